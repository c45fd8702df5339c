package plugin

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// sysctlAllowlist is the tuning plugin's: one regular expression per line. Where the file exists,
// only sysctls that match a line may be set.
const sysctlAllowlist = "/etc/cni/tuning/allowlist.conf"

// checkSysctls refuses sysctls that the allowlist does not match. Without sysctls it reads nothing.
func checkSysctls(names []string) error {
	for _, name := range names {
		allowed, err := sysctlAllowed(name)
		if err != nil {
			return err
		}
		if !allowed {
			return cnierr.Invalid("sysctl", name, "a name that a line of "+sysctlAllowlist+" matches")
		}
	}
	return nil
}

func sysctlAllowed(name string) (bool, error) {
	file, err := os.Open(sysctlAllowlist)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()

	lines := bufio.NewScanner(file)
	for lines.Scan() {
		pattern := strings.TrimSpace(lines.Text())
		if pattern == "" {
			continue
		}
		matches, err := regexp.MatchString(pattern, name)
		if err != nil {
			return false, fmt.Errorf("%s: line %q: %w", sysctlAllowlist, pattern, err)
		}
		if matches {
			return true, nil
		}
	}
	return false, lines.Err()
}
