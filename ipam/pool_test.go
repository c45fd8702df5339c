package ipam

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/loader/flock"
)

func TestReserveResult(t *testing.T) {
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	write(t, resolvConf, "# a comment\nnameserver 10.0.0.53\n")
	cfg := parse(t, "net", fmt.Sprintf(`{
		"dataDir": %q, "resolvConf": %q, "routes": [{"dst": "0.0.0.0/0"}],
		"ranges": [[{"subnet": "10.1.0.0/16"}], [{"subnet": "fd00::/64", "gateway": "fd00::ff"}], [{"subnet": "10.2.0.0/24"}]]
	}`, t.TempDir(), resolvConf), Request{IPs: []string{"10.2.0.77"}})

	got, err := Open(cfg, Options{}).Reserve(t.Context(), Attachment{"c1", "eth0"})
	if err != nil {
		t.Fatal(err)
	}
	want := &Result{
		Addresses: []Address{
			{netip.MustParsePrefix("10.1.0.2/16"), netip.MustParseAddr("10.1.0.1")},
			{netip.MustParsePrefix("fd00::1/64"), netip.MustParseAddr("fd00::ff")},
			{netip.MustParsePrefix("10.2.0.77/24"), netip.MustParseAddr("10.2.0.1")},
		},
		Routes: cfg.Routes,
		DNS:    types.DNS{Nameservers: []string{"10.0.0.53"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestReserveExhausted(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}], [{"subnet": "10.2.0.0/30"}]]`)
	if got := mustReserve(t, pool, Attachment{"c1", "eth0"}); got != "10.1.0.2 10.2.0.2" {
		t.Fatalf("got %s", got)
	}
	before := readDir(t, dir)

	_, err := pool.Reserve(t.Context(), Attachment{"c2", "eth0"})
	if !errors.Is(err, ErrExhausted) {
		t.Fatalf("got %v, want ErrExhausted", err)
	}
	if want := "no free address: range set 1 (10.2.0.1-10.2.0.2) in " + dir; err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
	if after := readDir(t, dir); !maps.Equal(before, after) {
		t.Errorf("the failure left traces:\n%q\nbefore:\n%q", after, before)
	}
	if err := pool.Available(t.Context()); !errors.Is(err, ErrExhausted) {
		t.Errorf("Available: got %v, want ErrExhausted", err)
	}

	mustRelease(t, pool, Attachment{"c1", "eth0"})
	if err := pool.Available(t.Context()); err != nil {
		t.Errorf("Available after release: %v", err)
	}
	if got := mustReserve(t, pool, Attachment{"c2", "eth0"}); got != "10.1.0.3 10.2.0.2" {
		t.Errorf("after release: got %s", got)
	}
}

func TestReserveDuplicate(t *testing.T) {
	tests := []struct {
		name  string
		file  string
		held  string
		refer string // what the error must name
	}{
		{"own record", "10.1.0.9", "c1\r\neth0", "container c1 interface eth0 holds [10.1.0.9]"},
		{"outside the ranges", "10.9.0.9", "c1\r\neth0", "[10.9.0.9]"},
		{"old record", "10.1.0.9", "c1", "[10.1.0.9]"},
		{"another interface", "10.1.0.9", "c1\r\neth1", ""},
		{"another container", "10.1.0.9", "c11\r\neth0", ""},
		{"no address", "notes", "c1\r\neth0", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
			write(t, filepath.Join(dir, tt.file), tt.held)

			_, err := pool.Reserve(t.Context(), Attachment{"c1", "eth0"})
			if tt.refer == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, ErrDuplicate) || !strings.Contains(err.Error(), tt.refer) {
				t.Errorf("got %v, want ErrDuplicate with %q", err, tt.refer)
			}
		})
	}
}

func TestReserveRequested(t *testing.T) {
	const section = `{"dataDir": %q, "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]]}`
	dataDir := t.TempDir()
	open := func(ips ...string) *Pool {
		return Open(parse(t, "net", fmt.Sprintf(section, dataDir), Request{IPs: ips}), Options{})
	}
	if got := mustReserve(t, open("fd00::99", "10.1.0.99"), Attachment{"c1", "eth0"}); got != "10.1.0.99 fd00::99" {
		t.Errorf("got %s", got)
	}

	_, err := open("fd00::99").Reserve(t.Context(), Attachment{"c2", "eth0"})
	if !errors.Is(err, ErrTaken) {
		t.Fatalf("got %v, want ErrTaken", err)
	}
	if want := "container c1 interface eth0 holds fd00::99"; !strings.Contains(err.Error(), want) {
		t.Errorf("%q does not say %q", err, want)
	}
	held, err := open().Reserved(t.Context(), Attachment{"c2", "eth0"})
	if err != nil || held != nil {
		t.Errorf("the failure left %v, %v", held, err)
	}
}

func TestReleaseAndReserved(t *testing.T) {
	tests := []struct {
		name      string
		files     map[string]string
		held      string // by c1 eth0
		remaining []string
	}{
		{"nothing there", nil, "[]", nil},
		{"own of both families", map[string]string{"10.1.0.2": "c1\r\neth0", "fd00::2": "c1\r\neth0"}, "[10.1.0.2 fd00::2]", nil},
		{"outside the ranges", map[string]string{"10.9.0.2": "c1\r\neth0"}, "[10.9.0.2]", nil},
		{"old record", map[string]string{"10.1.0.2": "c1"}, "[10.1.0.2]", nil},
		{"own before old", map[string]string{"10.1.0.2": "c1", "10.1.0.3": "c1\r\neth0"}, "[10.1.0.3]", []string{"10.1.0.2"}},
		{"others", map[string]string{"10.1.0.2": "c1\r\neth1", "10.1.0.3": "c2\r\neth0", "10.1.0.4": "c"}, "[]", []string{"10.1.0.2", "10.1.0.3", "10.1.0.4"}},
		{"torn", map[string]string{"10.1.0.2": "", "10.1.0.3": "c1\r\neth0"}, "[10.1.0.3]", []string{"10.1.0.2"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
			for name, content := range tt.files {
				write(t, filepath.Join(dir, name), content)
			}
			held, err := pool.Reserved(t.Context(), Attachment{"c1", "eth0"})
			if got := fmt.Sprint(held); err != nil || got != tt.held {
				t.Errorf("reserved: got %s, %v; want %s", got, err, tt.held)
			}

			mustRelease(t, pool, Attachment{"c1", "eth0"})
			for name := range tt.files {
				_, err := os.Stat(filepath.Join(dir, name))
				if got, want := err == nil, contains(tt.remaining, name); got != want {
					t.Errorf("%s exists after release: %v, want %v", name, got, want)
				}
			}
		})
	}
}

func TestWithoutDirectory(t *testing.T) {
	cfg := parse(t, "net", fmt.Sprintf(`{"dataDir": %q, "subnet": "10.1.0.0/24"}`, filepath.Join(t.TempDir(), "a", "b")), Request{})
	pool := Open(cfg, Options{})

	mustRelease(t, pool, Attachment{"c1", "eth0"})
	if held, err := pool.Reserved(t.Context(), Attachment{"c1", "eth0"}); err != nil || held != nil {
		t.Errorf("reserved: got %v, %v", held, err)
	}
	if err := pool.Retain(t.Context(), nothing); err != nil {
		t.Errorf("retain: %v", err)
	}
	if _, err := os.Stat(cfg.DataDir); err == nil {
		t.Error("an operation that frees created the directory")
	}
	if err := pool.Available(t.Context()); err != nil {
		t.Errorf("available: %v", err)
	}
	mustReserve(t, pool, Attachment{"c1", "eth0"})
}

func TestNetworksAreApart(t *testing.T) {
	dataDir := t.TempDir()
	section := fmt.Sprintf(`{"dataDir": %q, "subnet": "10.1.0.0/24"}`, dataDir)
	one, two := Open(parse(t, "one", section, Request{}), Options{}), Open(parse(t, "two", section, Request{}), Options{})
	a := Attachment{"c1", "eth0"}
	mustReserve(t, one, a)
	mustReserve(t, two, a)

	mustRelease(t, one, a)
	if err := one.Retain(t.Context(), nothing); err != nil {
		t.Fatal(err)
	}
	if held, err := two.Reserved(t.Context(), a); err != nil || len(held) != 1 {
		t.Errorf("network two lost its address: %v, %v", held, err)
	}
}

func TestBusy(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	lock, err := flock.Acquire(t.Context(), filepath.Join(dir, "lock"), flock.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()

	a := Attachment{"c1", "eth0"}
	operations := map[string]func(context.Context) error{
		"Reserve":   func(ctx context.Context) error { _, err := pool.Reserve(ctx, a); return err },
		"Release":   func(ctx context.Context) error { return pool.Release(ctx, a) },
		"Reserved":  func(ctx context.Context) error { _, err := pool.Reserved(ctx, a); return err },
		"Retain":    func(ctx context.Context) error { return pool.Retain(ctx, nothing) },
		"Available": pool.Available,
	}
	for name, operate := range operations {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		if err := operate(ctx); !errors.Is(err, flock.ErrBusy) {
			t.Errorf("%s: got %v, want flock.ErrBusy", name, err)
		}
		cancel()
	}
}

// CHECK only reads, so CHECKs of many containers need not wait for each other.
func TestReservedSharesTheLock(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	lock, err := flock.Acquire(t.Context(), filepath.Join(dir, "lock"), flock.Shared)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := pool.Reserved(ctx, Attachment{"c1", "eth0"}); err != nil {
		t.Error(err)
	}
}

func TestRetain(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	for name, content := range map[string]string{
		"10.1.0.2": "keep\r\neth0", "10.1.0.3": "keep\r\neth1", "fd00::3": "keep\r\neth1",
		"10.1.0.4": "drop\r\neth0", "10.1.0.5": "old", "10.1.0.6": "older", "10.1.0.7": "",
		"last_reserved_ip.0": "10.1.0.7", "notes": "drop\r\neth0", temporaryName: "drop\r\neth0",
	} {
		write(t, filepath.Join(dir, name), content)
	}
	asked := map[Attachment]int{}
	err := pool.Retain(t.Context(), func(a Attachment) bool {
		asked[a]++
		return a == Attachment{"keep", "eth0"} || a == Attachment{"old", ""}
	})
	if err != nil {
		t.Fatal(err)
	}
	for a, times := range asked {
		if times != 1 {
			t.Errorf("asked %d times about %v", times, a)
		}
	}
	remaining := map[string]string{
		"10.1.0.2": "keep\r\neth0", "10.1.0.5": "old", "last_reserved_ip.0": "10.1.0.7", "notes": "drop\r\neth0", "lock": "",
	}
	if got := readDir(t, dir); !maps.Equal(got, remaining) {
		t.Errorf("remaining:\n%q\nwant:\n%q", got, remaining)
	}
}

func TestRetainGoesOnAfterErrors(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	for _, unreadable := range []string{"10.1.0.2", "10.1.0.200"} {
		if err := os.MkdirAll(filepath.Join(dir, unreadable, "x"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(dir, "10.1.0.9"), "c1\r\neth0")

	err := pool.Retain(t.Context(), nothing)
	if _, err := os.Stat(filepath.Join(dir, "10.1.0.9")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the address of c1: got %v, want %v", err, fs.ErrNotExist)
	}
	for _, unreadable := range []string{"10.1.0.2:", "10.1.0.200:"} {
		if err == nil || !strings.Contains(err.Error(), unreadable) {
			t.Errorf("error %v does not name %s", err, unreadable)
		}
	}
}

// Random operations must have the same results as a naive model.
func TestPoolAgainstNaiveModel(t *testing.T) {
	gateways := map[netip.Addr]bool{netip.MustParseAddr("10.1.0.1"): true, netip.MustParseAddr("10.2.0.4"): true}
	for _, test := range []struct {
		name, ranges      string
		containers, steps int
	}{
		{"few addresses", `[[{"subnet": "10.1.0.0/29"}, {"subnet": "10.2.0.0/29", "rangeStart": "10.2.0.3", "gateway": "10.2.0.4"}]]`, 7, 2000},
		{"long runs", `[[{"subnet": "10.1.0.0/24"}, {"subnet": "10.2.0.0/25", "rangeStart": "10.2.0.3", "gateway": "10.2.0.4"}]]`, 400, 2500},
	} {
		t.Run(test.name, func(t *testing.T) {
			pool, _ := newPool(t, test.ranges)
			compareWithNaive(t, pool, newNaive(pool.cfg.Ranges[0]), gateways, test.containers, test.steps)
		})
	}
}

func compareWithNaive(t *testing.T, pool *Pool, model *naive, gateways map[netip.Addr]bool, containers, steps int) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range steps {
		a := Attachment{fmt.Sprintf("c%d", random.IntN(containers)), fmt.Sprintf("eth%d", random.IntN(2))}
		switch random.IntN(5) {
		case 0, 1, 2:
			want, wantErr := model.reserve(a, gateways)
			result, err := pool.Reserve(t.Context(), a)
			if !errors.Is(err, wantErr) || (err == nil) != (wantErr == nil) {
				t.Fatalf("reserve %v: got %v, want %v", a, err, wantErr)
			}
			if err == nil && result.Addresses[0].Prefix.Addr() != want {
				t.Fatalf("reserve %v: got %v, want %s", a, result.Addresses, want)
			}
		case 3:
			model.release(a)
			mustRelease(t, pool, a)
		case 4:
			var want []netip.Addr
			for _, addr := range model.all {
				if model.held[addr] == a {
					want = append(want, addr)
				}
			}
			if got, err := pool.Reserved(t.Context(), a); err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("reserved %v: got %v, %v; want %v", a, got, err, want)
			}
		}
	}
}

func TestParseResolvConf(t *testing.T) {
	got := parseResolvConf("# nameserver 1.1.1.1\n; search a\n\n  nameserver 10.0.0.53 # trailing\nnameserver fd00::53\r\n" +
		"domain a.example\ndomain b.example\nsearch a.example b.example\nsearch c.example\noptions ndots:5 rotate\nsortlist 10.0.0.0\nnameserver\n")
	want := types.DNS{
		Nameservers: []string{"10.0.0.53", "fd00::53"},
		Domain:      "b.example",
		Search:      []string{"a.example", "b.example", "c.example"},
		Options:     []string{"ndots:5", "rotate"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestReserveWithoutResolvConf(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	pool.cfg.ResolvConf = filepath.Join(dir, "missing")
	if _, err := pool.Reserve(t.Context(), Attachment{"c1", "eth0"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want os.ErrNotExist", err)
	}
	if held, _ := pool.Reserved(t.Context(), Attachment{"c1", "eth0"}); held != nil {
		t.Errorf("the failure left %v", held)
	}
}

func nothing(Attachment) bool { return false }

func parse(t testing.TB, network, section string, req Request) *Config {
	t.Helper()
	cfg, err := Parse(network, json.RawMessage(section), req)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// newPool returns a pool on a new directory, and that directory.
func newPool(t testing.TB, ranges string) (*Pool, string) {
	t.Helper()
	pool, dir, _ := newLoggedPool(t, ranges)
	return pool, dir
}

func newLoggedPool(t testing.TB, ranges string) (*Pool, string, *bytes.Buffer) {
	t.Helper()
	cfg := parse(t, "net", fmt.Sprintf(`{"dataDir": %q, "ranges": %s}`, t.TempDir(), ranges), Request{})
	if err := os.Mkdir(cfg.Dir(), 0o755); err != nil {
		t.Fatal(err)
	}
	log := &bytes.Buffer{}
	return Open(cfg, Options{IndexDir: t.TempDir(), Log: slog.New(slog.NewTextHandler(log, nil))}), cfg.Dir(), log
}

// mustReserve returns the addresses, joined by spaces.
func mustReserve(t testing.TB, pool *Pool, a Attachment) string {
	t.Helper()
	result, err := pool.Reserve(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	var addrs []string
	for _, address := range result.Addresses {
		addrs = append(addrs, address.Prefix.Addr().String())
	}
	return strings.Join(addrs, " ")
}

func mustRelease(t testing.TB, pool *Pool, a Attachment) {
	t.Helper()
	if err := pool.Release(t.Context(), a); err != nil {
		t.Fatal(err)
	}
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// readDir returns the contents of all files by name.
func readDir(t testing.TB, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			t.Fatal(err)
		}
		files[entry.Name()] = string(content)
	}
	return files
}

func contains(names []string, name string) bool {
	return strings.Contains(" "+strings.Join(names, " ")+" ", " "+name+" ")
}
