package testenv

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// fakePlugin is a plugin that prints its network namespace on standard error.
const fakePlugin = `#!/bin/sh
cat >/dev/null
echo "netns $(readlink /proc/self/ns/net) fs $(stat -f -c %T /sys/fs/bpf)" >&2
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.1.0", "supportedVersions": ["1.0.0", "1.1.0"]}' ;;
ADD)
	if [ "$CNI_CONTAINERID" = refused ]; then
		echo '{"cniVersion": "1.1.0", "code": 11, "msg": "try again", "details": "busy"}'
		exit 1
	fi
	if [ "$CNI_CONTAINERID" = hang ]; then
		exec sleep 1000
	fi
	echo '{"cniVersion": "1.1.0", "interfaces": [{"name": "eth0", "sandbox": "'$CNI_NETNS'"}],
		"ips": [{"address": "fd00::5/64", "interface": 0}, {"address": "10.0.0.5/24", "interface": 0}]}' ;;
STATUS) exit 3 ;;
esac
`

const fakeConflist = `{"cniVersion": "1.1.0", "name": "net", "plugins": [{"type": "fake", "capabilities": {"portMappings": true}}]}`

func fakeRuntime(t *testing.T) *Runtime {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "fake"), []byte(fakePlugin), 0o755); err != nil {
		t.Fatal(err)
	}
	return NewRuntime(t, New(t, "node"), []byte(fakeConflist), dir)
}

func TestRuntime(t *testing.T) {
	r := fakeRuntime(t)
	ctx := Context(t)
	pod := r.AddPod(t, "c1", map[string]any{"portMappings": []map[string]any{{"hostPort": 80, "containerPort": 8080}}})
	if pod.Addr4() != netip.MustParseAddr("10.0.0.5") || pod.Addr6() != netip.MustParseAddr("fd00::5") {
		t.Errorf("addresses are %s and %s", pod.Addr4(), pod.Addr6())
	}
	if pod.Result.Interfaces[0].Sandbox != pod.Path {
		t.Errorf("sandbox is %s, want %s", pod.Result.Interfaces[0].Sandbox, pod.Path)
	}

	call := r.LastCall(t)
	var node string
	if err := r.Node.Do(func() (err error) { node, err = os.Readlink("/proc/thread-self/ns/net"); return err }); err != nil {
		t.Fatal(err)
	}
	if got, want := string(call.Stderr), "netns "+node+" fs bpf_fs\n"; got != want {
		t.Errorf("plugin ran in %q, want %q", got, want)
	}
	var config struct {
		RuntimeConfig struct{ PortMappings []struct{ HostPort int } }
	}
	if err := json.Unmarshal(call.Stdin, &config); err != nil || len(config.RuntimeConfig.PortMappings) != 1 {
		t.Errorf("plugin read %s (%v)", call.Stdin, err)
	}
	if call.Getenv("CNI_COMMAND") != "ADD" || call.Getenv("CNI_IFNAME") != "eth0" || call.Exit != 0 {
		t.Errorf("call is %+v", call)
	}

	if err := pod.Check(ctx); err != nil {
		t.Error(err)
	}
	if err := r.Status(ctx); err == nil || !strings.Contains(err.Error(), "exited with 3") {
		t.Errorf("status: %v", err)
	}
	if err := r.GC(ctx, types.GCAttachment{ContainerID: "c1", IfName: "eth0"}); err != nil {
		t.Error(err)
	}
	if err := pod.Del(ctx); err != nil {
		t.Error(err)
	}
	if call := r.LastCall(t); call.Getenv("CNI_COMMAND") != "DEL" || !strings.Contains(string(call.Stdin), "prevResult") {
		t.Errorf("call is %+v", call)
	}
	if pod.Addr4().IsValid() || pod.Addr6().IsValid() {
		t.Error("a detached pod has addresses")
	}
}

func TestRuntimeErrors(t *testing.T) {
	r := fakeRuntime(t)
	err := r.NewPod(t, "refused").Add(Context(t))
	var cniError *types.Error
	if !errors.As(err, &cniError) || cniError.Code != types.ErrTryAgainLater || cniError.Details != "busy" {
		t.Errorf("refused ADD: %#v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := r.NewPod(t, "hang").Add(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("hanging ADD: %v", err)
	}
}

func TestInvoke(t *testing.T) {
	r := fakeRuntime(t)
	plugin := filepath.Join(r.PluginPath[0], "fake")
	call, err := r.Node.Invoke(Context(t), plugin, map[string]string{"PATH": os.Getenv("PATH"), "CNI_COMMAND": "STATUS"}, []byte("{"))
	if err != nil || call.Exit != 3 || len(call.Stdout) != 0 || !strings.Contains(string(call.Stderr), "bpf_fs") {
		t.Errorf("got %+v, %v", call, err)
	}
	if _, err := r.Node.Invoke(Context(t), plugin+"-absent", nil, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent plugin: %v", err)
	}
	call, err = r.Node.Invoke(Context(t), "/usr/bin/env", nil, nil)
	if err != nil || len(call.Stdout) != 0 {
		t.Errorf("environment is %s (%v), want none", call.Stdout, err)
	}
}

func TestBuild(t *testing.T) {
	if dir := os.Getenv(BinDirEnv); dir == "" {
		if path := Build(t, "github.com/containernetworking/cni/cnitool"); Build(t, "github.com/containernetworking/cni/cnitool") != path {
			t.Error("second build has another path")
		} else if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	t.Setenv(BinDirEnv, t.TempDir())
	if _, err := build("./cmd/absent"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent prebuilt binary: %v", err)
	}
	if err := os.WriteFile(filepath.Join(os.Getenv(BinDirEnv), "tool"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if path, err := build("./cmd/tool"); err != nil || path != filepath.Join(os.Getenv(BinDirEnv), "tool") {
		t.Errorf("got %s, %v", path, err)
	}
}
