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

// maxSize is the size of all files, before compression. One file may have half of what is left of it.
const maxSize = 32 << 20

// archive is a tar file under construction. It keeps the first error of writing.
type archive struct {
	zip    *gzip.Writer
	tar    *tar.Writer
	now    time.Time
	left   int
	err    error
	report Report
}

func newArchive(to io.Writer) *archive {
	zip := gzip.NewWriter(to)
	return &archive{zip: zip, tar: tar.NewWriter(zip), now: time.Now().Truncate(time.Second), left: maxSize}
}

// limit is how many bytes the next file may have.
func (a *archive) limit() int { return a.left / 2 }

// add adds what could be collected for a file, and records why something is missing.
func (a *archive) add(name string, content []byte, err error) {
	if limit := a.limit(); len(content) > limit {
		content, err = content[:limit], errors.Join(err, fmt.Errorf("cut after %d bytes", limit))
	}
	if err != nil {
		a.report.Missing = append(a.report.Missing, show.Short(name)+": "+show.Message(err.Error()))
	}
	if len(content) > 0 || err == nil {
		a.left -= len(content)
		a.write(name, content)
	}
}

func (a *archive) write(name string, content []byte) {
	const directory = "ebpfnet-bugreport/"

	if a.err != nil {
		return
	}
	a.report.Files++
	a.err = a.tar.WriteHeader(&tar.Header{Name: directory + show.Short(name), Mode: 0o600, Size: int64(len(content)), ModTime: a.now})
	if a.err == nil {
		_, a.err = a.tar.Write(content)
	}
}

func (a *archive) close() error { return errors.Join(a.err, a.tar.Close(), a.zip.Close()) }
