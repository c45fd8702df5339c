package ipam

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"
)

const manyRanges = `[[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]]`

// With a fresh index no other attachment's record is read: a record whose holder is changed
// in place, which no program does, goes unnoticed.
func TestIndexSparesReading(t *testing.T) {
	pool, dir := newPool(t, manyRanges)
	mustReserve(t, pool, Attachment{"c1", "eth0"})
	other := filepath.Join(dir, mustReserveFirst(t, pool, Attachment{"c2", "eth0"}))
	write(t, other, "c3\r\neth0")

	mustReserve(t, pool, Attachment{"c3", "eth0"})
	mustRelease(t, pool, Attachment{"c3", "eth0"})
	if held, err := pool.Reserved(t.Context(), Attachment{"c3", "eth0"}); err != nil || held != nil {
		t.Errorf("c3 has %v, %v", held, err)
	}
	if got := readDir(t, dir)[filepath.Base(other)]; got != "c3\r\neth0" {
		t.Errorf("read a record that the index does not name: it is now %q", got)
	}
}

// Every change of the directory, except a complete operation of ours, makes the index stale.
func TestIndexGoesStale(t *testing.T) {
	const addr = "10.1.0.200"
	for _, test := range []struct {
		name   string
		change func(t *testing.T, pool *Pool, dir string)
	}{
		{"reservation of host-local", func(t *testing.T, _ *Pool, dir string) {
			write(t, filepath.Join(dir, addr), "c1\r\neth0")
		}},
		{"operation that was killed", func(t *testing.T, pool *Pool, dir string) {
			s, err := pool.create(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			r := &reservation{pool: pool, store: s, holder: Attachment{"c1", "eth0"}}
			if err := r.reserveEach(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.lock.Release()
		}},
		{"and then a clock that goes back", func(t *testing.T, _ *Pool, dir string) {
			write(t, filepath.Join(dir, addr), "c1\r\neth0")
			if err := os.Chtimes(dir, time.Time{}, time.Now().Add(-1000*time.Hour)); err != nil {
				t.Fatal(err)
			}
		}},
		{"operation with another index", func(t *testing.T, pool *Pool, dir string) {
			other := Open(pool.cfg, Options{IndexDir: t.TempDir()})
			mustReserve(t, other, Attachment{"c1", "eth0"})
		}},
		{"operation without index", func(t *testing.T, pool *Pool, dir string) {
			mustReserve(t, Open(pool.cfg, Options{}), Attachment{"c1", "eth0"})
		}},
		{"index of another boot", func(t *testing.T, pool *Pool, dir string) {
			write(t, filepath.Join(dir, "10.1.0.2"), "c1\r\neth0") // in place: the stamp stays
			pool.boot = func() string { return "another" }
		}},
		{"index that cannot be read", func(t *testing.T, pool *Pool, dir string) {
			write(t, filepath.Join(dir, "10.1.0.2"), "c1\r\neth0")
			i := openIndex(pool.options.IndexDir, pool.boot(), dir)
			write(t, i.link(Attachment{"c1", "eth0"}), "no link")
		}},
		{"index that is lost", func(t *testing.T, pool *Pool, dir string) {
			write(t, filepath.Join(dir, "10.1.0.2"), "c1\r\neth0")
			if err := os.RemoveAll(pool.options.IndexDir); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			pool, dir := newPool(t, manyRanges)
			mustReserve(t, pool, Attachment{"c0", "eth0"})
			if openIndex(pool.options.IndexDir, pool.boot(), dir) == nil {
				t.Fatal("no index to begin with")
			}
			test.change(t, pool, dir)

			want, err := Open(pool.cfg, Options{}).Reserved(t.Context(), Attachment{"c1", "eth0"})
			if err != nil || len(want) == 0 {
				t.Fatalf("c1 has %v, %v", want, err)
			}
			if got, err := pool.Reserved(t.Context(), Attachment{"c1", "eth0"}); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("c1 has %v, %v; want %v", got, err, want)
			}
			mustRelease(t, pool, Attachment{"c1", "eth0"})
			if got, err := Open(pool.cfg, Options{}).Reserved(t.Context(), Attachment{"c1", "eth0"}); err != nil || got != nil {
				t.Errorf("after release c1 has %v, %v", got, err)
			}
			if openIndex(pool.options.IndexDir, pool.boot(), dir) == nil {
				t.Error("no index was made again")
			}
		})
	}
}

// Random operations, ours and foreign ones, have the same results as without an index.
func TestIndexAgainstReadingAll(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/28"}], [{"subnet": "fd00::/124"}]]`)
	all := Open(pool.cfg, Options{})
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 600 {
		a := Attachment{fmt.Sprintf("c%d", random.IntN(9)), fmt.Sprintf("eth%d", random.IntN(2))}
		addr := fmt.Sprintf("10.1.0.%d", 2+random.IntN(12))
		switch random.IntN(9) {
		case 0, 1, 2:
			_, _ = pool.Reserve(t.Context(), a) // that may be exhausted, or held
		case 3:
			_, _ = pool.Replace(t.Context(), a)
		case 4, 5:
			mustRelease(t, pool, a)
		case 6:
			if err := pool.Retain(t.Context(), func(Attachment) bool { return random.IntN(8) > 0 }); err != nil {
				t.Fatal(err)
			}
		case 7: // as host-local, which never writes over another's
			if _, err := os.Stat(filepath.Join(dir, addr)); err != nil {
				write(t, filepath.Join(dir, addr), []string{"c1", "c1\r\neth0", ""}[random.IntN(3)])
			}
		case 8:
			os.Remove(filepath.Join(dir, addr))
		}
		for c := range 9 {
			a := Attachment{fmt.Sprintf("c%d", c), "eth0"}
			want, wantErr := all.Reserved(t.Context(), a)
			got, err := pool.Reserved(t.Context(), a)
			if err != nil || wantErr != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("%s has %v, %v; by reading all %v, %v", a, got, err, want, wantErr)
			}
		}
	}
}

func TestWithoutIndex(t *testing.T) {
	for name, host := range map[string]Options{
		"none wanted": {},
		"no directory": {IndexDir: func() string {
			file := filepath.Join(t.TempDir(), "file")
			write(t, file, "")
			return file
		}()},
	} {
		t.Run(name, func(t *testing.T) {
			pool, _ := newPool(t, manyRanges)
			pool = Open(pool.cfg, host)
			a := Attachment{"c1", "eth0"}
			mustReserve(t, pool, a)
			if held, err := pool.Reserved(t.Context(), a); err != nil || len(held) != 2 {
				t.Errorf("held: %v, %v", held, err)
			}
			mustRelease(t, pool, a)
			if held, err := pool.Reserved(t.Context(), a); err != nil || held != nil {
				t.Errorf("after release: %v, %v", held, err)
			}
		})
	}
}

// The index loses attachments that hold nothing any more, and only one index remains.
func TestIndexIsTidy(t *testing.T) {
	pool, dir := newPool(t, manyRanges)
	for i := range 8 {
		mustReserve(t, pool, Attachment{fmt.Sprintf("c%d", i), "eth0"})
		if i%3 == 0 {
			os.Remove(filepath.Join(dir, "10.1.0.2"))
		}
	}
	for i := range 4 {
		mustRelease(t, pool, Attachment{fmt.Sprintf("c%d", i), "eth0"})
	}
	if err := pool.Retain(t.Context(), func(a Attachment) bool { return a.ContainerID == "c7" }); err != nil {
		t.Fatal(err)
	}
	links, err := filepath.Glob(filepath.Join(pool.options.IndexDir, "*", "*", "*"))
	if err != nil || len(links) != 1 || links[0] != openIndex(pool.options.IndexDir, pool.boot(), dir).link(Attachment{"c7", "eth0"}) {
		t.Errorf("the index has %v, %v; want that of c7 alone", links, err)
	}
}

// An unreadable record could be any attachment's, so there is no index until it is readable.
func TestNoIndexWithUnreadableRecord(t *testing.T) {
	pool, dir := newPool(t, manyRanges)
	if err := os.Mkdir(filepath.Join(dir, "10.1.0.77"), 0o755); err != nil {
		t.Fatal(err)
	}
	mustReserve(t, pool, Attachment{"c1", "eth0"})
	if openIndex(pool.options.IndexDir, pool.boot(), dir) != nil {
		t.Error("there is an index")
	}
	mustRelease(t, pool, Attachment{"c1", "eth0"})
}

// An attachment with more addresses than fit in a symbolic link prevents an index.
func TestAttachmentWithMostAddresses(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/16"}]]`)
	for i := range 1000 {
		write(t, filepath.Join(dir, fmt.Sprintf("10.1.%d.%d", 1+i/200, 1+i%200)), "c1\r\neth0")
	}
	mustReserve(t, pool, Attachment{"c2", "eth0"})
	mustRelease(t, pool, Attachment{"c1", "eth0"})
	if held, err := pool.Reserved(t.Context(), Attachment{"c1", "eth0"}); err != nil || held != nil {
		t.Errorf("after release: %d addresses, %v", len(held), err)
	}
	if held, err := pool.Reserved(t.Context(), Attachment{"c2", "eth0"}); err != nil || len(held) != 1 {
		t.Errorf("c2 has %v, %v", held, err)
	}
}

// mustReserveFirst returns the first of the addresses.
func mustReserveFirst(t *testing.T, pool *Pool, a Attachment) (addr string) {
	t.Helper()
	fmt.Sscan(mustReserve(t, pool, a), &addr)
	return addr
}
