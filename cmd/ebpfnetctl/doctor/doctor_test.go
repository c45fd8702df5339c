package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestNetworkdConfig reads the files as networkd does: of namesakes the first directory's, and the last part wins.
func TestNetworkdConfig(t *testing.T) {
	for name, test := range map[string]struct {
		files map[string]string
		want  bool
	}{
		"none":              {nil, true},
		"default":           {map[string]string{"etc/systemd/networkd.conf": "[Network]\n#ManageForeignRoutes=no\n"}, true},
		"off":               {map[string]string{"etc/systemd/networkd.conf": "[Network]\nManageForeignRoutes = False\n"}, false},
		"other section":     {map[string]string{"etc/systemd/networkd.conf": "[DHCPv4]\nManageForeignRoutes=no\n"}, true},
		"vendor's":          {map[string]string{"usr/lib/systemd/networkd.conf": "[Network]\nManageForeignRoutes=no\n"}, false},
		"hidden":            {map[string]string{"usr/lib/systemd/networkd.conf": "[Network]\nManageForeignRoutes=no\n", "etc/systemd/networkd.conf": ""}, true},
		"a part wins":       {map[string]string{"etc/systemd/networkd.conf": "[Network]\nManageForeignRoutes=no\n", "usr/lib/systemd/networkd.conf.d/10-x.conf": "[Network]\nManageForeignRoutes=yes\n"}, true},
		"the last part":     {map[string]string{"etc/systemd/networkd.conf.d/10-x.conf": "[Network]\nManageForeignRoutes=yes\n", "run/systemd/networkd.conf.d/20-x.conf": "[Network]\nManageForeignRoutes=0\n"}, false},
		"a part is hidden":  {map[string]string{"etc/systemd/networkd.conf.d/10-x.conf": "", "usr/lib/systemd/networkd.conf.d/10-x.conf": "[Network]\nManageForeignRoutes=no\n"}, true},
		"of another suffix": {map[string]string{"etc/systemd/networkd.conf.d/10-x.conf.off": "[Network]\nManageForeignRoutes=no\n"}, true},
	} {
		h := &host{Options: Options{Root: t.TempDir()}}
		for file, text := range test.files {
			path := filepath.Join(h.Root, file)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		config, err := h.networkdConfig()
		if got := isTrue(config["ManageForeignRoutes"]); err != nil || got != test.want {
			t.Errorf("%s: got %v (%v), want %v", name, got, err, test.want)
		}
	}
}

func TestJudgeMap(t *testing.T) {
	for count, want := range map[int]State{0: "", 90: "", 91: Warning, 99: Warning, 100: Wrong} {
		got := State("")
		if found := judgeMap("flows", count, 100, "remedy"); len(found) > 0 {
			got = found[0].State
		}
		if got != want {
			t.Errorf("%d of 100: got %q, want %q", count, got, want)
		}
	}
}

// TestErrorsAreFindings wants a line for each error of a check.
func TestErrorsAreFindings(t *testing.T) {
	one, two := errors.New("one"), errors.New("two")
	for want, err := range map[int]error{0: nil, 1: fmt.Errorf("more: %w", one), 2: errors.Join(one, nil, two)} {
		if got := unjoin(err); len(got) != want {
			t.Errorf("%v: got %d errors, want %d", err, len(got), want)
		}
	}
}

// TestWord quotes names that a shell would misread.
func TestWord(t *testing.T) {
	for name, want := range map[string]string{
		"eth0.100": "eth0.100", "flannel$(id)": "'flannel$(id)'", "cni0;id": "'cni0;id'", "a'b": `'a'\''b'`, "": "''",
	} {
		if got := word(name); got != want {
			t.Errorf("%q: got %s, want %s", name, got, want)
		}
	}
}

// TestReach tells this container's answer from that of others.
func TestReach(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := &container{server: listener, nonce: "this one"}
	go served.answer()
	remote := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), portOf(listener))
	if err := served.reach(t.Context(), nil, remote); err != nil {
		t.Errorf("this container: got %v, want none", err)
	}
	other := &container{nonce: "other on"}
	if err := other.reach(t.Context(), nil, remote); err == nil || !strings.Contains(err.Error(), "somebody else") {
		t.Errorf("another container: got %v, want somebody else", err)
	}
	listener.Close()
	if err := served.reach(t.Context(), nil, remote); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("nobody: got %v, want ECONNREFUSED", err)
	}
}

// TestHangingCheck has a check and a mend that take all the time they get: those that follow have as much.
func TestHangingCheck(t *testing.T) {
	defer func(table []check, mends []mend, before time.Duration) {
		checks, fixes, patience = table, mends, before
	}(checks, fixes, patience)
	patience = time.Millisecond
	var until time.Time
	hang := func(ctx context.Context) error {
		until, _ = ctx.Deadline()
		<-ctx.Done()
		return ctx.Err()
	}
	hasOwnTime := func(ctx context.Context) string {
		own, _ := ctx.Deadline()
		return fmt.Sprint("own time: ", own.After(until))
	}
	checks = []check{
		{"hangs", func(ctx context.Context, _ *host) ([]Finding, error) {
			return []Finding{wrong("", "a").by(fixRepair), wrong("", "b").by(fixForwarding)}, hang(ctx)
		}},
		{"next", func(ctx context.Context, _ *host) ([]Finding, error) {
			return []Finding{good("%s", hasOwnTime(ctx))}, nil
		}},
	}
	fixes = []mend{
		{fixRepair, func(ctx context.Context, _ Options) ([]string, error) { return nil, hang(ctx) }},
		{fixForwarding, func(ctx context.Context, _ Options) ([]string, error) { return []string{hasOwnTime(ctx)}, nil }},
	}
	found := Run(t.Context(), Options{})
	if len(found) != 4 || found[2].State != Unknown || found[3].What != "own time: true" {
		t.Errorf("got %+v, want time for the check that follows", found)
	}
	found, err := Fix(t.Context(), Options{}, found)
	if !errors.Is(err, context.DeadlineExceeded) || found[0].State != Fixed || found[0].What != "own time: true" {
		t.Errorf("got %+v (%v), want time for the mend that follows", found, err)
	}
}
