package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
)

// TestChecksAreDocumented wants each check in the README.
func TestChecksAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(text), "\n## doctor\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, c := range checks {
		if !found || !strings.Contains(section, "`"+c.name+"`") {
			t.Errorf("README.md: no check `%s` in the section doctor", c.name)
		}
	}
}

// TestUnknown wants no check to call good what it could not look at.
func TestUnknown(t *testing.T) {
	notLoaded, bad := fmt.Errorf("open: %w", loader.ErrNotLoaded), errors.New("bad")
	for _, test := range []struct {
		host  *host
		check string
		want  error
	}{
		{&host{errAttached: bad}, "programs", bad},
		{&host{errAttached: bad}, "uplinks", bad},
		{&host{errAttached: bad}, "rp-filter", bad},
		{&host{errDatapath: notLoaded}, "programs", nil},
		{&host{errDatapath: notLoaded}, "uplinks", nil},
		{&host{errDatapath: notLoaded, Options: Options{CacheDir: "/dev/null"}}, "containers", unix.ENOTDIR},
		{&host{errDatapath: notLoaded, Options: Options{CacheDir: t.TempDir()}}, "containers", nil},
	} {
		i := slices.IndexFunc(checks, func(c check) bool { return c.name == test.check })
		found, err := checks[i].look(t.Context(), test.host)
		isGood := slices.ContainsFunc(found, func(f Finding) bool { return f.State == Good })
		if !errors.Is(err, test.want) || isGood != (test.want == nil) {
			t.Errorf("%s: got %v (%v), want error %v, or else a good state", test.check, found, err, test.want)
		}
	}
}

func TestJudgeNeighbors(t *testing.T) {
	const full = "entries  allocs table_fulls\n00000050 000066f0 00000010\n00000050 00000001 00000001\n"
	for name, test := range map[string]struct {
		statistics string
		limit      int
		want       string
	}{
		"full":              {full, 1024, "was full 17 times: it has 1024 places"},
		"full, then larger": {full, 16384, ""},
		"never full":        {"entries  allocs table_fulls\n00000050 000066f0 00000000\n", 1024, ""},
		"an old kernel":     {"entries  allocs\n00000050 000066f0\n", 1024, ""},
		"no statistics":     {"", 0, ""},
	} {
		found := judgeNeighbors(test.statistics, test.limit)
		if (len(found) > 0) != (test.want != "") || len(found) > 0 && !strings.Contains(found[0].What, test.want) {
			t.Errorf("%s: got %v, want %q", name, found, test.want)
		}
	}
}

func TestJudgeMap(t *testing.T) {
	for count, want := range map[int]State{0: "", 90: "", 91: Warning, 99: Warning, 100: Wrong} {
		got := State("")
		if found := judgeMap("endpoints", count, 100, "remedy"); len(found) > 0 {
			got = found[0].State
		}
		if got != want {
			t.Errorf("%d of 100: got %q, want %q", count, got, want)
		}
	}
}

func TestJudgeFlowTable(t *testing.T) {
	for used, want := range map[float64]State{0: "", 0.6: "", 0.61: Warning, 1: Warning} {
		got := State("")
		if found := judgeFlowTable(used, 16384); len(found) > 0 {
			got = found[0].State
		}
		if got != want {
			t.Errorf("%v: got %q, want %q", used, got, want)
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

// TestReach wants this container's answer, and no other's.
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

// TestHangingCheck has a check and a fix that take all the time they get: those that follow have as much.
func TestHangingCheck(t *testing.T) {
	defer func(table []check, before time.Duration, byRepair, orphans fix) {
		checks, patience, fixByRepair, fixOrphans = table, before, byRepair, orphans
	}(checks, patience, fixByRepair, fixOrphans)
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
			return []Finding{wrong("", "a").by(&fixByRepair), wrong("", "b").by(&fixOrphans)}, hang(ctx)
		}},
		{"next", func(ctx context.Context, _ *host) ([]Finding, error) {
			return []Finding{good("%s", hasOwnTime(ctx))}, nil
		}},
	}
	fixByRepair = func(ctx context.Context, _ *host) ([]string, error) { return nil, hang(ctx) }
	fixOrphans = func(ctx context.Context, _ *host) ([]string, error) { return []string{hasOwnTime(ctx)}, nil }
	found := Run(t.Context(), Options{})
	if len(found) != 4 || found[2].State != Unknown || found[3].What != "own time: true" {
		t.Errorf("got %+v, want time for the check that follows", found)
	}
	found, err := Fix(t.Context(), Options{}, found)
	if !errors.Is(err, context.DeadlineExceeded) || found[0].State != Fixed || found[0].What != "own time: true" {
		t.Errorf("got %+v (%v), want time for the fix that follows", found, err)
	}
}
