// Package bugreport writes an archive of what somebody needs to find a fault on a host: what ebpfnetctl prints, the
// maps, and what of the host the datapath depends on. It keeps addresses and leaves out secrets.
//
// It may import bpf, loader and plugin/show.
package bugreport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Options say what to collect.
type Options struct {
	Nouns   [][]string // commands of ebpfnetctl, whose JSON is taken
	Metrics []string   // the command for the metrics
	ConfDir string     // of the network configurations
}

// Report says what was written.
type Report struct {
	Files  int
	Failed []string // the files that tell of something that could not be had
}

// introduction is in the last file, which tells of all others.
const introduction = `A report of ebpfnet, collected by "ebpfnetctl bugreport" at %s.

nouns/   what ebpfnetctl prints
maps/    the datapath's maps; at most %d entries of each
cni/     the network configurations
host/    versions, settings, devices, routes and rules of the host
*.error  why something is missing, or incomplete

Addresses and names are as they are. Left out are the key of the datapath's
hashes, packets, and what looks like a secret: it reads "%s". A file has at most
%d bytes, and all of them %d. Of a longer list, the first entries are there.

%s
`

// Write collects and writes everything. What cannot be had is a file that says why; an error is one of writing, or
// ctx is done.
func Write(ctx context.Context, to io.Writer, o Options) (*Report, error) {
	a := newArchive(to)
	for _, step := range []func(context.Context, *archive, Options){addNouns, addMaps, addConfigurations, addHost} {
		step(ctx, a, o)
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("interrupted: %w", err)
		}
	}
	told := "Nothing is missing."
	if len(a.told) > 0 {
		told = "Missing, or incomplete:\n" + strings.Join(a.told, "\n")
	}
	a.write("README.txt", fmt.Appendf(nil, introduction, a.now.UTC().Format(time.RFC3339), mostEntries, leftOut, mostOfFile, mostOfAll, told))
	return &a.report, a.close()
}

// addNouns runs ebpfnetctl for each command, so that one that hangs or fails costs no other.
func addNouns(ctx context.Context, a *archive, o Options) {
	for _, words := range o.Nouns {
		text, err := readNoun(ctx, append(words, "-o", "json"), a.room())
		a.add("nouns/"+words[0]+".json", text, err)
	}
	text, err := run(ctx, self, o.Metrics...)
	a.add("nouns/metrics.txt", redactText(text), err)
}

const self = "/proc/self/exe" // also after an upgrade

// readNoun returns the JSON that a command prints, without secrets.
func readNoun(ctx context.Context, words []string, room int) (text []byte, err error) {
	reader, writer := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := runTo(ctx, writer, self, words...)
		writer.Close()
		ended <- err
	}()
	text, err = redactJSON(reader, room)
	_, _ = io.Copy(io.Discard, reader) // what is no JSON
	errRun := <-ended
	if errRun != nil && len(text) == 0 {
		return nil, errRun
	}
	return text, errors.Join(errRun, err)
}
