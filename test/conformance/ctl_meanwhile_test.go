package conformance

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ctlMeanwhile runs ebpfnetctl, and does something while it reads the only record that there is: a FIFO is in its
// place until the reader has opened it.
func (h *host) ctlMeanwhile(t *testing.T, do func(), args ...string) (exit int, stdout, stderr string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(record.DefaultDir, "*", "*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("records: got %q (%v), want one", files, err)
	}
	text := testenv.ReadFile(t, files[0])
	fifo := files[0] + ".fifo"
	testenv.Must(t, unix.Mkfifo(fifo, 0o600))
	testenv.Must(t, os.Rename(fifo, files[0]))
	cmd := exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	testenv.Must(t, h.Node.Do(cmd.Start))
	var writer *os.File
	testenv.Eventually(t, "ebpfnetctl to read the record", func() (err error) {
		writer, err = os.OpenFile(files[0], os.O_WRONLY|unix.O_NONBLOCK, 0) // ENXIO while nobody reads
		return err
	})
	defer writer.Close()
	testenv.Must(t, os.WriteFile(fifo, text, 0o600))
	testenv.Must(t, os.Rename(fifo, files[0]))
	do()
	if _, err := writer.Write(text); err != nil {
		t.Fatal(err)
	}
	writer.Close()
	_ = cmd.Wait() // the exit code is returned
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// TestCtlAttachmentsDuringAdd lists containers while one is added: no living one is dead.
func TestCtlAttachmentsDuringAdd(t *testing.T) {
	h := newHost(t)
	runtime := testenv.NewRuntime(t, h.Node, []byte(scriptConflist), filepath.Dir(h.plugin))
	runtime.AddPod(t, "web", map[string]any{"aliases": []string{"www"}})
	exit, stdout, stderr := h.ctlMeanwhile(t, func() { runtime.AddPod(t, "late", nil) }, "attachments", "-o", "json")
	var list []admin.Attachment
	if err := json.Unmarshal([]byte(stdout), &list); err != nil || exit != 0 || len(list) == 0 {
		t.Fatalf("got exit code %d (%v): %s%s", exit, err, stdout, stderr)
	}
	for _, a := range list {
		if a.Dead || a.ContainerID == "" {
			t.Errorf("got %+v, want a living container with a name", a)
		}
	}
}

// TestCtlDoctorDuringDel compares containers while one is removed, which is no difference.
func TestCtlDoctorDuringDel(t *testing.T) {
	h := newHost(t)
	runtime := testenv.NewRuntime(t, h.Node, []byte(scriptConflist), filepath.Dir(h.plugin))
	runtime.AddPod(t, "web", map[string]any{"aliases": []string{"www"}})
	pod := runtime.AddPod(t, "leaving", nil)
	remove := func() {
		testenv.Must(t, pod.Del(testenv.Context(t)))
	}
	_, stdout, stderr := h.ctlMeanwhile(t, remove, "doctor", "--cache-dir", runtime.CacheDir, "-o", "json")
	if found := findings(t, stdout, "containers"); strings.Contains(found, "leaving") || !strings.HasPrefix(found, "good: ") || stderr != "" {
		t.Errorf("got %s%s, want no difference", found, stderr)
	}
}
