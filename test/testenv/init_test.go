package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestInit has a host whose name, processes and files are its own. They end with the test that made it.
func TestInit(t *testing.T) {
	const file = "/etc/testenv-init"
	t.Cleanup(func() { os.Remove(file) }) // if it has failed
	var outer string                      // the number of the host's last process here
	t.Run("host", func(t *testing.T) {
		init := fmt.Sprint(New(t, "host").StartInit(t, "inner", unix.CLONE_NEWUTS))
		output, err := exec.Command("nsenter", "--target", init, "--mount", "--net", "--pid", "--uts", "--",
			"sh", "-c", "hostname; cat /proc/1/comm; ls /opt; echo >"+file+"; setsid sleep 4321 >/dev/null 2>&1 &").CombinedOutput()
		self, _ := os.ReadFile("/proc/self/comm")
		if want := "inner\n" + string(self); err != nil || string(output) != want {
			t.Errorf("on the host: got %s, %v; want %s", output, err, want)
		}
		Eventually(t, "the host's last process", func() error {
			found, err := exec.Command("pgrep", "-f", "^sleep 4321").Output()
			outer = strings.TrimSpace(string(found))
			return err
		})
	})
	for _, path := range []string{file, "/proc/" + outer} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("%s after the end of the host: got %v, want none", path, err)
		}
	}
}
