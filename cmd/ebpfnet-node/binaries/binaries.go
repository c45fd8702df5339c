// Package binaries installs the plugins into the runtime's directory.
package binaries

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// names are those of the plugins.
var names = []string{"ebpfnet", "ebpfnet-ipam"}

// Install copies the plugins from one directory to another, each by a rename: a runtime runs either the old or the new
// one. It does not touch plugins that are the same already.
func Install(from, to string) error {
	for _, name := range names {
		if err := install(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			return fmt.Errorf("install %s into %s: %w", name, to, err)
		}
	}
	return nil
}

func install(from, to string) error {
	const executable = 0o755

	source, err := sum(from)
	if err != nil {
		return err
	}
	if present, err := sum(to); err == nil && present == source {
		return os.Chmod(to, executable)
	}
	file, err := os.Open(from)
	if err != nil {
		return err
	}
	defer file.Close()
	return nodestate.ReplaceWith(to, file, executable)
}

func sum(path string) (sum [sha256.Size]byte, err error) {
	file, err := os.Open(path)
	if err != nil {
		return sum, err
	}
	defer file.Close()
	hash := sha256.New()
	_, err = io.Copy(hash, file)
	return [sha256.Size]byte(hash.Sum(nil)), err
}

// Remove removes the plugins.
func Remove(from string) error {
	var errs []error
	for _, name := range names {
		if err := os.Remove(filepath.Join(from, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
