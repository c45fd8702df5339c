package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// Call is one execution of a plugin, with its input and output.
type Call struct {
	Plugin string
	// Env is the plugin's environment, as in os/exec.
	Env    []string
	Stdin  []byte
	Stdout []byte
	Stderr []byte
	// Exit is the exit code, or -1 if a signal ended the plugin.
	Exit int
}

// Getenv returns the value of a variable in the plugin's environment, such as CNI_COMMAND.
func (c *Call) Getenv(name string) string {
	value := ""
	for _, entry := range c.Env {
		if key, v, _ := strings.Cut(entry, "="); key == name {
			value = v // the last one counts
		}
	}
	return value
}

// Err returns nil for exit code 0, and otherwise the *types.Error that the plugin printed. If
// it printed something else, the error has no code and quotes that.
func (c *Call) Err() error {
	if c.Exit == 0 {
		return nil
	}
	var cniError types.Error
	if err := json.Unmarshal(c.Stdout, &cniError); err != nil {
		return &types.Error{Msg: fmt.Sprintf("plugin %s exited with %d without an error result: stdout %q, stderr %q",
			c.Plugin, c.Exit, c.Stdout, c.Stderr)}
	}
	return &cniError
}

// Invoke executes a plugin binary in the namespace with exactly the given environment and
// standard input. It returns an error if the plugin cannot start or ctx ends; the failure of
// a plugin is in the Call.
func (ns *Namespace) Invoke(ctx context.Context, path string, env map[string]string, stdin []byte) (*Call, error) {
	environ := make([]string, 0, len(env))
	for name, value := range env {
		environ = append(environ, name+"="+value)
	}
	slices.Sort(environ)
	return ns.invoke(ctx, path, environ, stdin)
}

func (ns *Namespace) invoke(ctx context.Context, path string, environ []string, stdin []byte) (*Call, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path)
	cmd.WaitDelay = waitDelay
	cmd.Env = environ
	if cmd.Env == nil {
		cmd.Env = []string{} // nil means this process's
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &stdout, &stderr

	// The child gets its network namespace from the thread that forks it.
	if err := ns.Do(cmd.Start); err != nil {
		return nil, fmt.Errorf("start plugin: %w", err)
	}
	err := cmd.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("run plugin %s: %w: stderr %q", path, ctx.Err(), stderr.Bytes())
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return nil, fmt.Errorf("run plugin %s: %w", path, err)
	}
	return &Call{
		Plugin: path, Env: environ, Stdin: stdin,
		Stdout: stdout.Bytes(), Stderr: stderr.Bytes(), Exit: cmd.ProcessState.ExitCode(),
	}, nil
}

// recorded is how many calls are kept: the benchmark makes thousands, with configurations of megabytes.
const recorded = 100

// recorder is libcni's invoke.Exec: it executes plugins in a namespace and records the last calls.
type recorder struct {
	version.PluginDecoder

	ns    *Namespace
	mu    sync.Mutex
	calls []*Call
}

var _ invoke.Exec = (*recorder)(nil)

func (r *recorder) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	call, err := r.ns.invoke(ctx, path, environ, stdin)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.calls = append(r.calls[max(0, len(r.calls)-recorded+1):], call)
	r.mu.Unlock()
	return call.Stdout, call.Err()
}

func (r *recorder) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

func (r *recorder) list() []*Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.calls)
}
