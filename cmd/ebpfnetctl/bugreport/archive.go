package bugreport

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Bounds of the report, before compression.
const (
	mostOfFile = 8 << 20
	mostOfAll  = 64 << 20
)

// archive is a tar file under construction. It remembers the first error of writing.
type archive struct {
	zip    *gzip.Writer
	tar    *tar.Writer
	now    time.Time
	left   int
	err    error
	report Report
	told   []string // what is missing or incomplete, and why
}

func newArchive(to io.Writer) *archive {
	zip := gzip.NewWriter(to)
	return &archive{zip: zip, tar: tar.NewWriter(zip), now: time.Now().Truncate(time.Second), left: mostOfAll}
}

// room is how many bytes the next file may have.
func (a *archive) room() int { return min(mostOfFile, a.left) }

// add adds a file, and another one if there is something to say about it.
func (a *archive) add(name string, content []byte, err error) {
	if most := a.room(); len(content) > most {
		err = errors.Join(err, fmt.Errorf("cut: it has %d bytes, and there is room for %d", len(content), most))
		content = content[:most]
	}
	a.left -= len(content)
	if len(content) > 0 || err == nil {
		a.write(name, content)
	}
	if err != nil {
		message := show.Message(err.Error())
		a.told = append(a.told, name+": "+message)
		a.report.Failed = append(a.report.Failed, name+".error")
		a.write(name+".error", []byte(message+"\n"))
	}
}

func (a *archive) write(name string, content []byte) {
	const directory = "ebpfnet-bugreport/"

	if a.err != nil {
		return
	}
	a.err = a.tar.WriteHeader(&tar.Header{
		Name:    directory + show.Short(name),
		Mode:    0o600,
		Size:    int64(len(content)),
		ModTime: a.now,
	})
	if a.err == nil {
		_, a.err = a.tar.Write(content)
	}
	a.report.Files++
}

func (a *archive) close() error {
	return errors.Join(a.err, a.tar.Close(), a.zip.Close())
}
