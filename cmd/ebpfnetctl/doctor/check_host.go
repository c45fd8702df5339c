package doctor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The directories of systemd's configuration: a file in an earlier one hides its namesakes.
var systemdDirs = []string{"/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd"}

// lookNetworkd finds what systemd-networkd would do to containers' devices and routes.
func lookNetworkd(_ context.Context, h *host) (findings []Finding, err error) {
	if _, err := os.Stat(h.path("/run/systemd/netif/links")); errors.Is(err, fs.ErrNotExist) {
		return []Finding{good("systemd-networkd does not run")}, nil
	}
	for _, device := range h.devices {
		if !h.isOurs(device) {
			continue
		}
		state, err := readKeys(h.path(fmt.Sprintf("/run/systemd/netif/links/%d", device.Attrs().Index)), "")
		if err != nil {
			return nil, err
		}
		if file := state["NETWORK_FILE"]; file != "" {
			findings = append(findings, wrong("exclude it there: [Match] Name=!ebpf*, then networkctl reload", "systemd-networkd manages %s of a container by %s: it changes addresses and routes", device.Attrs().Name, file))
		}
	}
	config, err := h.networkdConfig()
	if err != nil {
		return findings, err
	}
	if isTrue(config["ManageForeignRoutes"]) {
		findings = append(findings, warning("ManageForeignRoutes=no in [Network] of /etc/systemd/networkd.conf.d/ebpfnet.conf, then systemctl restart systemd-networkd",
			"ManageForeignRoutes is on: when systemd-networkd starts again, it removes routes of devices that it manages and has not made, such as those to other hosts' containers"))
	}
	return orGood(findings, "systemd-networkd leaves containers alone"), nil
}

// networkdConfig reads networkd.conf and its parts, the last of which win.
func (h *host) networkdConfig() (config map[string]string, err error) {
	config = map[string]string{"ManageForeignRoutes": "yes"} // networkd's default
	parts := map[string]string{}
	main := ""
	for _, dir := range systemdDirs {
		if file := h.path(dir + "/networkd.conf"); main == "" && isFile(file) {
			main = file
		}
		files, err := filepath.Glob(h.path(dir + "/networkd.conf.d/*.conf"))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			if name := filepath.Base(file); parts[name] == "" {
				parts[name] = file
			}
		}
	}
	files := []string{main}
	var names []string
	for name := range parts {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		files = append(files, parts[name])
	}
	for _, file := range files {
		keys, err := readKeys(file, "Network")
		if err != nil {
			return nil, err
		}
		for key, value := range keys {
			config[key] = value
		}
	}
	return config, nil
}

func isFile(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// readKeys reads the keys of a section of a file of systemd, "" for those before any. A file that is
// missing has none.
func readKeys(path, section string) (keys map[string]string, err error) {
	keys = map[string]string{}
	file, err := os.Open(path)
	if path == "" || errors.Is(err, fs.ErrNotExist) {
		return keys, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	at := ""
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if strings.HasPrefix(line, "[") {
			at = strings.Trim(line, "[]")
		}
		if key, value, ok := strings.Cut(line, "="); ok && at == section && line[0] != '#' && line[0] != ';' {
			keys[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return keys, lines.Err()
}

// isTrue reads a boolean of systemd; an empty value is its default.
func isTrue(value string) bool {
	return !slices.Contains([]string{"no", "false", "0", "off", "n", "f"}, strings.ToLower(value))
}

// lookClock finds a clock that went back, or that nobody sets.
func lookClock(_ context.Context, h *host) (findings []Finding, err error) {
	const tolerance = time.Minute

	if file, info := newestReservation(h.ours()); info != nil && time.Until(info.ModTime()) > tolerance {
		findings = append(findings, wrong("set the clock, and let chrony or systemd-timesyncd keep it",
			"the clock has gone back: %s was written at %s. Certificates and leases may not be valid", file, info.ModTime().UTC().Format(time.DateTime)))
	}
	state, err := unix.Adjtimex(&unix.Timex{}) // reads
	if err != nil {
		return findings, fmt.Errorf("ask the kernel for the state of the clock: %w", err)
	}
	if state == unix.TIME_ERROR && len(findings) == 0 {
		findings = append(findings, warning("run chrony or systemd-timesyncd", "nobody sets the clock: times in logs cannot be compared with those of other hosts"))
	}
	return orGood(findings, "it is set by the network"), nil
}
