package record

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ebpfnet/ebpfnet/maps"
)

// A record that cannot be written leaves the former one.
func TestFailedWriteKeepsRecord(t *testing.T) {
	dir, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := &Record{Attachment: maps.Attachment{Network: "pods", ContainerID: "a", IfName: "eth0"}, CgroupPath: "before"}
	if err := dir.Write(r); err != nil {
		t.Fatal(err)
	}
	owner := r.Attachment.Owner()
	if err := os.Mkdir(dir.partial(owner), 0o700); err != nil { // so that the file cannot be written
		t.Fatal(err)
	}
	after := *r
	after.CgroupPath = "after"
	if err := dir.Write(&after); err == nil {
		t.Error("write: got no error")
	}
	if got, err := dir.Read(owner); err != nil || got == nil || got.CgroupPath != "before" {
		t.Errorf("got %+v (%v), want the former record", got, err)
	}
}

// A directory's name is not a pattern, and one without records has none.
func TestList(t *testing.T) {
	dir, err := Open(filepath.Join(t.TempDir(), "[a]*"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := dir.List(); err != nil || len(got) > 0 {
		t.Errorf("got %v (%v), want no records", got, err)
	}
	if err := dir.Write(&Record{Attachment: maps.Attachment{Network: "pods", ContainerID: "a", IfName: "eth0"}}); err != nil {
		t.Fatal(err)
	}
	if got, err := dir.List(); err != nil || len(got) != 1 || got[0].Attachment.ContainerID != "a" {
		t.Errorf("got %v (%v), want the record", got, err)
	}
}
