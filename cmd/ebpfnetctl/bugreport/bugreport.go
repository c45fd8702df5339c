// Package bugreport writes an archive of what somebody needs to find a fault on a host: what ebpfnetctl prints, the
// maps, and what of the host the datapath depends on. It keeps addresses and leaves out secrets.
//
// It may import bpf, loader and plugin/show.
package bugreport

import (
	"context"
	"fmt"
	"io"
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

// introduction is the first file.
const introduction = `A report of ebpfnet, collected by "ebpfnetctl bugreport" at %s.

nouns/   what ebpfnetctl prints
maps/    the datapath's maps; at most %d entries of each
cni/     the network configurations
host/    versions, settings, devices, routes and rules of the host
*.error  why something is missing, or incomplete

Addresses and names are as they are. Left out are the key of the datapath's
hashes, packets, and what looks like a secret: it reads "%s".
`

// Write collects and writes everything. What cannot be had is a file that says why; an error is one of writing, or
// ctx is done.
func Write(ctx context.Context, to io.Writer, o Options) (*Report, error) {
	a := newArchive(to)
	a.add("README.txt", fmt.Appendf(nil, introduction, time.Now().UTC().Format(time.RFC3339), mostEntries, leftOut), nil)
	for _, step := range []func(context.Context, *archive, Options){addNouns, addMaps, addConfigurations, addHost} {
		step(ctx, a, o)
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("interrupted: %w", err)
		}
	}
	return &a.report, a.close()
}

// addNouns runs ebpfnetctl for each command, so that one that hangs or fails costs no other.
func addNouns(ctx context.Context, a *archive, o Options) {
	const self = "/proc/self/exe" // also after an upgrade

	for _, words := range o.Nouns {
		text, err := run(ctx, self, append(words, "-o", "json")...)
		json, errRedact := redactJSON(text)
		if errRedact != nil && err == nil {
			err = fmt.Errorf("left out: %w", errRedact)
		}
		a.add("nouns/"+words[0]+".json", json, err)
	}
	text, err := run(ctx, self, o.Metrics...)
	a.add("nouns/metrics.txt", redactText(text), err)
}
