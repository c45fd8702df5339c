package metrics

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
)

// Write writes all metrics in the format of OpenMetrics, or nothing.
func Write(to io.Writer, from prometheus.Gatherer) error {
	return write(to, from, expfmt.NewFormat(expfmt.TypeOpenMetrics))
}

func write(to io.Writer, from prometheus.Gatherer, format expfmt.Format) error {
	families, err := from.Gather()
	if err != nil {
		return err
	}
	var text bytes.Buffer
	encoder := expfmt.NewEncoder(&text, format)
	for _, family := range families {
		if err := encoder.Encode(family); err != nil {
			return err
		}
	}
	if closer, ok := encoder.(expfmt.Closer); ok { // OpenMetrics ends with a line of its own
		if err := closer.Close(); err != nil {
			return err
		}
	}
	_, err = to.Write(text.Bytes())
	return err
}

// WriteTextfile replaces a file for node_exporter's textfile collector, which reads the older text format alone.
// Readers see the old file or the new one, also after a loss of power, and after an error the old one.
func WriteTextfile(file string, from prometheus.Gatherer) error {
	temporary, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+".*") // not *.prom: the collector skips it
	if err != nil {
		return err
	}
	err = errors.Join(
		write(temporary, from, expfmt.NewFormat(expfmt.TypeTextPlain)),
		temporary.Chmod(0o644), // node_exporter is not root
		temporary.Sync(),
		temporary.Close(),
	)
	if err == nil {
		err = os.Rename(temporary.Name(), file)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", file, err), os.Remove(temporary.Name()))
	}
	return syncDir(filepath.Dir(file))
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
