package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// newBootPool is newPool with a function that simulates a reboot. It skips the test on file
// systems without user xattrs, such as tmpfs before Linux 6.6.
func newBootPool(t *testing.T, ranges string) (pool *Pool, dir string, reboot func(id string)) {
	t.Helper()
	pool, dir = newPool(t, ranges)
	if err := unix.Setxattr(dir, "user.probe", []byte("?"), 0); errors.Is(err, unix.ENOTSUP) {
		var kernel unix.Utsname
		var version, patchLevel int
		if err := unix.Uname(&kernel); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscanf(unix.ByteSliceToString(kernel.Release[:]), "%d.%d", &version, &patchLevel); err != nil {
			t.Fatal(err)
		}
		if version > 6 || version == 6 && patchLevel >= 6 {
			t.Fatal("files in the temporary directory have no extended attributes, and this kernel's tmpfs has them: is TMPDIR on something else?")
		}
		t.Skip("extended attributes of tmpfs: since Linux 6.6")
	}
	boot := "first"
	pool.boot = func() string { return boot }
	return pool, dir, func(id string) {
		boot = id
		if err := os.RemoveAll(pool.options.IndexDir); err != nil {
			t.Fatal(err)
		}
	}
}

// Before a set counts as exhausted, addresses of containers of an earlier boot are reclaimed,
// and no others.
func TestReclaimAfterReboot(t *testing.T) {
	reserve := func(t *testing.T, pool *Pool, _ string) { mustReserve(t, pool, Attachment{"c1", "eth0"}) }
	record := func(content string) func(*testing.T, *Pool, string) {
		return func(t *testing.T, _ *Pool, dir string) { write(t, filepath.Join(dir, "10.1.0.2"), content) }
	}
	operate := func(t *testing.T, pool *Pool) { mustRelease(t, pool, Attachment{"c9", "eth0"}) }
	for _, test := range []struct {
		name  string
		first func(*testing.T, *Pool, string)
		then  func(t *testing.T, pool *Pool, reboot func(string))
		dead  bool
	}{
		{"same boot", reserve, func(*testing.T, *Pool, func(string)) {}, false},
		{"reboot", reserve, func(_ *testing.T, _ *Pool, reboot func(string)) { reboot("second") }, true},
		{"reboot, still alive", reserve, func(_ *testing.T, pool *Pool, reboot func(string)) {
			reboot("second")
			pool.options.Alive = func(a Attachment) bool { return a == Attachment{"c1", "eth0"} }
		}, false},
		{"reboot, another one alive", reserve, func(_ *testing.T, pool *Pool, reboot func(string)) {
			reboot("second")
			pool.options.Alive = func(a Attachment) bool { return a != Attachment{"c1", "eth0"} }
		}, true},
		{"reboot, and the container came back", reserve, func(t *testing.T, pool *Pool, reboot func(string)) {
			reboot("second")
			mustReserve(t, pool, Attachment{"c1", "eth0"})
		}, false},
		{"boot is not known", reserve, func(_ *testing.T, _ *Pool, reboot func(string)) { reboot("") }, false},
		{"host-local's, before or after the reboot", record("c1\r\neth0"), func(_ *testing.T, _ *Pool, reboot func(string)) { reboot("second") }, false},
		{"host-local's, come across after the reboot", record("c1\r\neth0"), func(t *testing.T, pool *Pool, reboot func(string)) {
			reboot("second")
			operate(t, pool)
		}, false},
		{"host-local's, come across before the reboot", record("c1\r\neth0"), func(t *testing.T, pool *Pool, reboot func(string)) {
			operate(t, pool)
			reboot("second")
		}, true},
		{"an old host-local's", record("c1"), func(t *testing.T, pool *Pool, reboot func(string)) {
			operate(t, pool)
			reboot("second")
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			pool, dir, reboot := newBootPool(t, `[[{"subnet": "10.1.0.0/30"}]]`)
			test.first(t, pool, dir)
			test.then(t, pool, reboot)

			if err := pool.Available(t.Context()); errors.Is(err, ErrExhausted) == test.dead {
				t.Errorf("Available: %v, want an address: %v", err, test.dead)
			}
			_, err := pool.Reserve(t.Context(), Attachment{"c2", "eth0"})
			if test.dead && err != nil || !test.dead && !errors.Is(err, ErrExhausted) {
				t.Fatalf("got %v, want an address: %v", err, test.dead)
			}
			if test.dead {
				if _, err := pool.Reserve(t.Context(), Attachment{"c3", "eth0"}); !errors.Is(err, ErrExhausted) {
					t.Errorf("after that: %v, want ErrExhausted", err)
				}
			}
		})
	}
}

// An address that somebody uses is not assigned, whether it is free, reclaimable, or the holder's of an earlier boot.
func TestReserveUsed(t *testing.T) {
	const used = "10.1.0.2"
	first := Attachment{"c1", "eth0"}
	for name, holder := range map[string]Attachment{"free": {}, "another's of an earlier boot": {"c9", "eth0"}, "its own of an earlier boot": first} {
		t.Run(name, func(t *testing.T) {
			pool, _, reboot := newBootPool(t, `[[{"subnet": "10.1.0.0/29", "rangeEnd": "10.1.0.3"}]]`)
			if holder != (Attachment{}) {
				mustReserve(t, pool, holder)
				reboot("second")
			}
			pool.options.InUse = func(addr netip.Addr) error {
				if addr.String() == used {
					return errors.New("somebody uses " + used)
				}
				return nil
			}
			if got := mustReserve(t, pool, first); got != "10.1.0.3" {
				t.Errorf("got %s, want the one that nobody uses", got)
			}
			if _, err := pool.Reserve(t.Context(), Attachment{"c2", "eth0"}); !errors.Is(err, ErrExhausted) {
				t.Errorf("got %v, want ErrExhausted", err)
			}
			if held, err := pool.Reserved(t.Context(), first); err != nil || fmt.Sprint(held) != "[10.1.0.3]" {
				t.Errorf("reserved: got %v, %v", held, err)
			}
		})
	}
}

// Free addresses are used first, and then one is reclaimed at a time, so that most
// containers that return get theirs back.
func TestReclaimNoMoreThanNeeded(t *testing.T) {
	pool, dir, reboot := newBootPool(t, `[[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/64"}]]`)
	for _, id := range []string{"c1", "c2", "c3"} { // of five
		mustReserve(t, pool, Attachment{id, "eth0"})
	}
	reboot("second")
	for i, want := range []string{"10.1.0.5 fd00::5", "10.1.0.6 fd00::6", "10.1.0.2 fd00::7"} {
		if got := mustReserve(t, pool, Attachment{"new", "eth" + string(rune('0'+i))}); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	files := readDir(t, dir)
	for addr, holder := range map[string]string{"fd00::2": "c1", "10.1.0.3": "c2", "10.1.0.4": "c3"} {
		if files[addr] != holder+"\r\neth0" {
			t.Errorf("%s is of %q, want %s", addr, files[addr], holder)
		}
	}
	// c1 has half of its addresses, c2 all, and both are marked with this boot from now on.
	if got := mustReserve(t, pool, Attachment{"c2", "eth0"}); got != "10.1.0.3 fd00::3" {
		t.Errorf("c2 got %s", got)
	}
	if got := mustReserve(t, pool, Attachment{"c1", "eth0"}); got != "10.1.0.4 fd00::2" {
		t.Errorf("c1 got %s", got)
	}
	if _, err := pool.Reserve(t.Context(), Attachment{"c2", "eth0"}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("c2 again: %v, want ErrDuplicate", err)
	}
	if _, err := pool.Reserve(t.Context(), Attachment{"c3", "eth0"}); !errors.Is(err, ErrExhausted) {
		t.Errorf("c3: %v, want ErrExhausted", err)
	}
}

func TestRequestedAddressOfEarlierBoot(t *testing.T) {
	pool, dir, reboot := newBootPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	mustReserve(t, pool, Attachment{"c1", "eth0"})
	pool.cfg.Requested[0] = pool.cfg.Ranges[0][0].Start.Next()
	if _, err := pool.Reserve(t.Context(), Attachment{"c2", "eth0"}); !errors.Is(err, ErrTaken) {
		t.Errorf("got %v, want ErrTaken", err)
	}
	reboot("second")
	if got := mustReserve(t, pool, Attachment{"c2", "eth0"}); got != "10.1.0.2" {
		t.Errorf("got %s", got)
	}
	if got := readDir(t, dir)["10.1.0.2"]; got != "c2\r\neth0" {
		t.Errorf("record is %q", got)
	}
}

// For a container that the caller knows is deleted, Replace keeps the addresses that fit,
// adds the missing ones, and releases the rest.
func TestReplace(t *testing.T) {
	for _, test := range []struct {
		name      string
		held      map[string]string
		requested string
		want      string
	}{
		{"nothing held", nil, "", "10.1.0.2 fd00::1"},
		{"both", map[string]string{"10.1.0.9": "c1\r\neth0", "fd00::9": "c1\r\neth0"}, "", "10.1.0.9 fd00::9"},
		{"one family", map[string]string{"fd00::9": "c1\r\neth0"}, "", "10.1.0.2 fd00::9"},
		{"two of a set", map[string]string{"10.1.0.9": "c1\r\neth0", "10.1.0.8": "c1\r\neth0"}, "", "10.1.0.8 fd00::1"},
		{"outside the ranges", map[string]string{"10.2.0.9": "c1\r\neth0"}, "", "10.1.0.2 fd00::1"},
		{"the gateway", map[string]string{"10.1.0.1": "c1\r\neth0"}, "", "10.1.0.2 fd00::1"},
		{"old record", map[string]string{"10.1.0.9": "c1"}, "", "10.1.0.9 fd00::1"},
		{"another requested", map[string]string{"10.1.0.9": "c1\r\neth0"}, "10.1.0.7", "10.1.0.7 fd00::1"},
		{"the same requested", map[string]string{"10.1.0.9": "c1\r\neth0"}, "10.1.0.9", "10.1.0.9 fd00::1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64", "gateway": "fd00::ff"}]]`)
			if test.requested != "" {
				requested, err := assignRequested([]string{test.requested}, pool.cfg.Ranges)
				if err != nil {
					t.Fatal(err)
				}
				pool.cfg.Requested = requested
			}
			write(t, filepath.Join(dir, "10.1.0.66"), "c2\r\neth0")
			for name, content := range test.held {
				write(t, filepath.Join(dir, name), content)
			}
			result, err := pool.Replace(t.Context(), Attachment{"c1", "eth0"})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, address := range result.Addresses {
				got = append(got, address.Prefix.Addr().String())
			}
			if strings.Join(got, " ") != test.want {
				t.Errorf("got %v, want %s", got, test.want)
			}
			for name, content := range readDir(t, dir) {
				isOurs := strings.HasPrefix(content, "c1")
				if isOurs != contains(got, name) || isOurs && content != "c1\r\neth0" {
					t.Errorf("%s is of %q", name, content)
				}
			}
			mustRelease(t, pool, Attachment{"c1", "eth0"})
			if left := readDir(t, dir); len(left) > 5 { // c2's, the lock and the last ones
				t.Errorf("left after release: %v", left)
			}
		})
	}
}

// If Replace fails for the second range set, it frees what it has reserved, and leaves the
// rest unchanged.
func TestReplaceFails(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}], [{"subnet": "10.2.0.0/30"}]]`)
	write(t, filepath.Join(dir, "10.1.0.9"), "c1\r\neth0")
	write(t, filepath.Join(dir, "10.2.0.2"), "c2\r\neth0")
	write(t, filepath.Join(dir, "10.3.0.9"), "c1\r\neth0")
	if _, err := pool.Replace(t.Context(), Attachment{"c1", "eth0"}); !errors.Is(err, ErrExhausted) {
		t.Fatalf("got %v, want ErrExhausted", err)
	}
	mustRelease(t, pool, Attachment{"c1", "eth0"})
	for name, content := range readDir(t, dir) {
		if strings.HasPrefix(content, "c1") {
			t.Errorf("left: %s", name)
		}
	}
}
