package runtimes

import (
	"fmt"
	"path/filepath"

	"github.com/BurntSushi/toml"
)

// crioConfig has the keys of crio.conf(5) that matter here.
type crioConfig struct {
	CRIO struct {
		Network struct {
			Default    string   `toml:"cni_default_network"`
			ConfDir    string   `toml:"network_dir"`
			PluginDirs []string `toml:"plugin_dirs"`
			PluginDir  string   `toml:"plugin_dir"` // before 1.13
		} `toml:"network"`
	} `toml:"crio"`
}

// findCRIO returns CRI-O, if it is configured or installed. A file in crio.conf.d wins over those before.
func findCRIO(root string) ([]Runtime, error) {
	const main = "/etc/crio/crio.conf"

	r := Runtime{Name: "CRI-O", ConfDir: defaultConfDir, BinDirs: []string{"/opt/cni/bin"}, SkipsInvalid: true}
	files := []string{main}
	for _, dir := range []string{"/usr/share/crio/crio.conf.d", "/etc/crio/crio.conf.d"} {
		parts, err := filepath.Glob(filepath.Join(root, dir, "*"))
		if err != nil {
			return nil, err
		}
		for _, part := range parts {
			files = append(files, filepath.Join(dir, filepath.Base(part)))
		}
	}
	isThere := exists(root, "/usr/bin/crio", "/usr/local/bin/crio", "/run/crio/crio.sock")
	for _, file := range files {
		text, found, err := readFile(root, file)
		if err == nil && found {
			isThere = true
			err = r.readCRIO(file, text)
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
	}
	if !isThere {
		return nil, nil
	}
	return []Runtime{r}, nil
}

func (r *Runtime) readCRIO(file, text string) error {
	var config crioConfig
	if _, err := toml.Decode(text, &config); err != nil {
		return err
	}
	network := config.CRIO.Network
	if network.Default != "" {
		r.Network, r.Source = network.Default, file
	}
	if network.ConfDir != "" {
		r.ConfDir, r.Source = network.ConfDir, file
	}
	if network.PluginDir != "" {
		r.BinDirs, r.Source = []string{network.PluginDir}, file
	}
	if len(network.PluginDirs) > 0 {
		r.BinDirs, r.Source = network.PluginDirs, file
	}
	return nil
}
