package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const pluginName = "ebpfnet"

// conflist is the network configuration list that the demo sets up, and what it
// has to know of it.
type conflist struct {
	raw  []byte
	path string // the file it is from

	name    string
	masq    bool   // pods are masqueraded
	ports   bool   // the runtime may ask for host ports
	dataDir string // of the addresses
}

// conflistPath returns the file that the options name, or the README.
func conflistPath(opts options) (string, error) {
	if opts.conflist != "" {
		return filepath.Abs(opts.conflist)
	}
	own, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the demo's own executable: %w", err)
	}
	return filepath.Join(filepath.Dir(own), "..", "README.md"), nil
}

func readConflist(path string) (*conflist, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w: the demo takes its network configuration from there: name another file by -conflist", err)
	}
	if !json.Valid(content) {
		block, found := jsonBlock(string(content))
		if !found {
			return nil, fmt.Errorf("%s is not JSON and has no ```json block with %q", path, pluginName)
		}
		content = []byte(block)
	}
	list := &conflist{raw: content, path: path}
	if err := list.parse(); err != nil {
		return nil, fmt.Errorf("configuration list of %s: %w", path, err)
	}
	return list, nil
}

// jsonBlock returns the first fenced block of Markdown that is marked json and
// names the plugin.
func jsonBlock(markdown string) (block string, found bool) {
	const fence = "```"

	inside, wanted := false, false
	var lines []string
	for line := range strings.Lines(markdown) {
		mark, isFence := strings.CutPrefix(strings.TrimSpace(line), fence)
		switch {
		case !isFence:
			lines = append(lines, line)
		case !inside:
			inside, wanted, lines = true, strings.TrimSpace(mark) == "json", nil
		default:
			block = strings.Join(lines, "")
			if wanted && strings.Contains(block, `"`+pluginName+`"`) {
				return block, true
			}
			inside = false
		}
	}
	return "", false
}

func (c *conflist) parse() error {
	var list struct {
		Name    string `json:"name"`
		Plugins []struct {
			Type         string          `json:"type"`
			IPMasq       bool            `json:"ipMasq"`
			Capabilities map[string]bool `json:"capabilities"`
			IPAM         struct {
				DataDir string `json:"dataDir"`
			} `json:"ipam"`
		} `json:"plugins"`
	}
	if err := json.Unmarshal(c.raw, &list); err != nil {
		return err
	}
	if len(list.Plugins) == 0 || list.Plugins[0].Type != pluginName {
		return fmt.Errorf("the first of \"plugins\" must be of type %q", pluginName)
	}
	plugin := list.Plugins[0]
	c.name, c.masq, c.ports = list.Name, plugin.IPMasq, plugin.Capabilities["portMappings"]

	// The default alone is private to the demo.
	if plugin.IPAM.DataDir != "" {
		return errors.New(`"ipam.dataDir" is a directory of this host, which the demo does not touch: take it out`)
	}
	c.dataDir = "/var/lib/cni/networks/" + list.Name
	return nil
}

// pluginDir returns the directory with the plugin's binary.
func pluginDir() (string, error) {
	dir := os.Getenv(testenv.BinDirEnv)
	if dir == "" {
		own, err := os.Executable()
		if err != nil {
			return "", fmt.Errorf("find the demo's own executable: %w", err)
		}
		dir = filepath.Dir(own)
	}
	info, err := os.Stat(filepath.Join(dir, pluginName))
	if err != nil {
		return "", fmt.Errorf("%w: the plugin is looked for beside the demo: run `make demo`, which builds both, or set $%s to its directory",
			err, testenv.BinDirEnv)
	}
	if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return "", fmt.Errorf("%s is no executable file", filepath.Join(dir, pluginName))
	}
	return filepath.Abs(dir)
}
