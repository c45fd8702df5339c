package record

import (
	"os"
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
