package ipam

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Reservations that host-local left on a node apply from our first operation on.
func TestTakeOverFromHostLocal(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/29"}]]`)
	for name, content := range map[string]string{
		"lock": "", "10.1.0.2": "c2\r\neth0", "10.1.0.4": "c4\r\neth0", "10.1.0.5": "c5", "last_reserved_ip.0": "10.1.0.3",
	} {
		write(t, filepath.Join(dir, name), content)
	}
	if got := mustReserve(t, pool, Attachment{"c6", "eth0"}); got != "10.1.0.6" {
		t.Errorf("got %s, want the first free one after the last reserved", got)
	}
	if got := mustReserve(t, pool, Attachment{"c3", "eth0"}); got != "10.1.0.3" {
		t.Errorf("got %s, want the one host-local had released", got)
	}
	if _, err := pool.Reserve(t.Context(), Attachment{"c7", "eth0"}); !errors.Is(err, ErrExhausted) {
		t.Errorf("got %v, want ErrExhausted", err)
	}
}

func TestTornRecordIsReplaced(t *testing.T) {
	for name, torn := range map[string]string{"empty": "", "zeroes": strings.Repeat("\x00", 70)} {
		t.Run(name, func(t *testing.T) {
			pool, dir, log := newLoggedPool(t, `[[{"subnet": "10.1.0.0/30"}]]`)
			path := filepath.Join(dir, "10.1.0.2")
			write(t, path, torn)

			if err := pool.Available(t.Context()); err != nil {
				t.Errorf("available: %v", err)
			}
			if got := mustReserve(t, pool, Attachment{"c1", "eth0"}); got != "10.1.0.2" {
				t.Errorf("got %s", got)
			}
			if got := readDir(t, dir)["10.1.0.2"]; got != "c1\r\neth0" {
				t.Errorf("record is %q", got)
			}
			if lines := strings.Count(log.String(), "\n"); lines != 1 || !strings.Contains(log.String(), path) || !strings.Contains(log.String(), "level=WARN") {
				t.Errorf("want one warning that names %s, got:\n%s", path, log)
			}
		})
	}
}

func TestDamagedLastReservedIsIgnored(t *testing.T) {
	for _, content := range []string{"", "\x00\x00", "10.1.0.300", "fd00::1", "10.9.0.1"} {
		pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
		write(t, filepath.Join(dir, "last_reserved_ip.0"), content)
		if got := mustReserve(t, pool, Attachment{"c1", "eth0"}); got != "10.1.0.2" {
			t.Errorf("%q: got %s", content, got)
		}
	}
}

// An unreadable file keeps its address, is reported, and affects no other attachment.
func TestUnreadableRecord(t *testing.T) {
	pool, dir, log := newLoggedPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	path := filepath.Join(dir, "10.1.0.2")
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if got := mustReserve(t, pool, Attachment{"c1", "eth0"}); got != "10.1.0.3" {
		t.Errorf("got %s", got)
	}
	if !strings.Contains(log.String(), path) {
		t.Errorf("no warning names %s:\n%s", path, log)
	}
	mustRelease(t, pool, Attachment{"c1", "eth0"})

	pool.cfg.Requested = append(pool.cfg.Requested[:0], pool.cfg.Ranges[0][0].Start.Next())
	if _, err := pool.Reserve(t.Context(), Attachment{"c1", "eth0"}); !errors.Is(err, ErrTaken) {
		t.Errorf("requested: got %v, want ErrTaken", err)
	}
}

// A process killed between link and unlink leaves the temporary name as a second link to
// a valid record, which must survive the cleanup.
func TestLeftTemporaryFile(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	temporary := filepath.Join(dir, temporaryName)
	operations := map[string]func() error{
		"Reserve":   func() error { _, err := pool.Reserve(t.Context(), Attachment{"c2", "eth0"}); return err },
		"Release":   func() error { return pool.Release(t.Context(), Attachment{"c2", "eth0"}) },
		"Retain":    func() error { return pool.Retain(t.Context(), func(Attachment) bool { return true }) },
		"Available": func() error { return pool.Available(t.Context()) },
	}
	write(t, filepath.Join(dir, "10.1.0.2"), "c1\r\neth0")
	for name, operate := range operations {
		if err := os.Link(filepath.Join(dir, "10.1.0.2"), temporary); err != nil {
			t.Fatal(err)
		}
		if err := operate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(temporary); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s left the temporary file: %v", name, err)
		}
		if got := readDir(t, dir)["10.1.0.2"]; got != "c1\r\neth0" {
			t.Errorf("%s damaged the record: %q", name, got)
		}
	}
}

// A staged file may already be linked to an address: nothing may write to it.
func TestWriteTemporaryRefusesStagedFile(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	s, err := pool.create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	first := pool.cfg.Ranges[0][0].Start
	if err := s.stage(Attachment{"c1", "eth0"}); err != nil {
		t.Fatal(err)
	}
	if reserved, err := s.reserve(first); !reserved || err != nil {
		t.Fatal(reserved, err)
	}
	if err := s.setLast(0, first); !errors.Is(err, os.ErrExist) {
		t.Errorf("got %v, want os.ErrExist", err)
	}
	if got := readDir(t, dir)[first.String()]; got != "c1\r\neth0" {
		t.Errorf("record is %q", got)
	}
}

// If last_reserved_ip cannot be written, only the position is lost, not the reservation.
func TestLastReservedIsOnlyAHint(t *testing.T) {
	pool, dir, log := newLoggedPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	if err := os.MkdirAll(filepath.Join(dir, "last_reserved_ip.0", "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got := mustReserve(t, pool, Attachment{"c1", "eth0"}); got != "10.1.0.2" {
		t.Errorf("got %s", got)
	}
	if !strings.Contains(log.String(), "last_reserved_ip.0") {
		t.Errorf("no warning:\n%s", log)
	}
	if _, err := os.Stat(filepath.Join(dir, temporaryName)); err == nil {
		t.Error("the temporary file is left")
	}
}

func TestAvailableNeedsAUsableDirectory(t *testing.T) {
	pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "a file")
	if err := pool.Available(t.Context()); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v, want an error that names %s", err, dir)
	}
}
