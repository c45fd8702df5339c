// Package nodestate reads and writes the files that the node agent of a cluster writes for the plugin and for
// operators: whether this host has been in the desired state since it booted. The files are below /run, so a reboot
// removes them.
package nodestate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Default is the path of the state.
const Default = "/run/ebpfnet-node/node.json"

// State is the agent's state.
type State struct {
	Node   string    `json:"node"`
	Synced time.Time `json:"synced,omitzero"` // when this host was first in the desired state; zero: not since boot
	// Policed is that time, in place of Synced, if the agent enforces NetworkPolicy. A plugin that is too old to do
	// its part finds no Synced, and refuses pods.
	Policed time.Time `json:"syncedWithPolicies,omitzero"`
	Error   string    `json:"error,omitempty"` // why it is not now
}

// ErrNotSynced is wrapped by the error for a host whose agent has not synced since boot.
var ErrNotSynced = errors.New("the node agent has not synced since boot")

// Check returns an error unless the agent whose state is at path has synced since boot. Before that, containers of
// other nodes cannot be reached, and the conflist may be from before the boot.
func Check(path string) error {
	state, err := Read(path)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrNotSynced, err)
	case state == State{}:
		return fmt.Errorf("%w: it has not written %s: is its pod of this node running?", ErrNotSynced, show.Value(path))
	case state.Synced.IsZero() && state.Policed.IsZero():
		return fmt.Errorf("%w: %s", ErrNotSynced, state.Error)
	}
	return nil
}

// Read reads the state. Without a file it is zero.
func Read(path string) (state State, err error) {
	const maxSize = 1 << 16 // bytes: each call of the plugin reads them
	if _, err := readJSON(path, maxSize, &state); err != nil {
		return State{}, err
	}
	return state, nil
}

// Write replaces the state, and makes its directory.
func Write(path string, state State) error { return replaceJSON(path, state) }

// readJSON reads a value from a file, if there is one.
func readJSON(path string, maxSize int64, value any) (exists bool, err error) {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, maxSize))
	if err == nil {
		err = json.Unmarshal(content, value)
	}
	if err != nil {
		return true, fmt.Errorf("read %s: %w", show.Value(path), err)
	}
	return true, nil
}

func replaceJSON(path string, value any) error {
	const reachable = 0o755

	content, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), reachable); err != nil {
		return err
	}
	_, err = Replace(path, append(content, '\n'))
	return err
}

// Replace replaces a file in one step: readers see either the old or the new content. It does not touch a file that has
// the content already, because runtimes load a configuration again when it changes.
func Replace(path string, content []byte) (changed bool, err error) {
	if present, err := os.ReadFile(path); err == nil && string(present) == string(content) {
		return false, nil
	}
	const readable = 0o644
	err = ReplaceWith(path, bytes.NewReader(content), readable)
	return err == nil, err
}

// ReplaceWith replaces a file in one step by the content of a reader.
func ReplaceWith(path string, content io.Reader, mode fs.FileMode) error {
	// Runtimes load all names that end in .conf, .conflist or .json. A file that a killed agent left is overwritten.
	temp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
	const private = 0o600
	file, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, private)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	err = errors.Join(err, file.Chmod(mode), file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return nil
}
