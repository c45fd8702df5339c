// Package runtimes finds out how the container runtimes of a host use CNI: it reads the configuration of
// containerd and CRI-O, and chooses the list that they choose.
package runtimes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/spf13/pflag"
)

// Runtime is how a container runtime uses CNI.
type Runtime struct {
	Name    string   // "": none is configured, and these are the usual directories
	Source  string   // the file that said so; "": its defaults
	ConfDir string   // of network configurations
	BinDirs []string // of plugins
	Network string   // the name of the list that it takes; "": the first by file name
	// CallsLoopback: it executes the plugin "loopback" for each pod, beside the list.
	CallsLoopback bool
	// SkipsInvalid: it takes the next file where one is not valid.
	SkipsInvalid bool
}

// defaultConfDir is where runtimes usually look for network configurations.
const defaultConfDir = "/etc/cni/net.d"

// defaultBinDirs are where distributions put plugins.
var defaultBinDirs = []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}

// Options say where runtimes have their files.
type Options struct {
	Root    string   // of the host's files; "": /
	ConfDir string   // of network configurations; "": where the runtimes look
	BinDirs []string // of plugins; nil: where the runtimes look
}

// AddFlags adds the flags for the options.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.Root, "root", "/", "`DIR` is where the host's files are, for a container that has them mounted")
	flags.StringVar(&o.ConfDir, "conf-dir", "", "`DIR` is the runtime's directory of networks, if it is not containerd or CRI-O")
	flags.StringSliceVar(&o.BinDirs, "bin-dir", nil, "`DIR` is the runtime's directory of plugins")
}

// Find returns the runtimes of the host, with their directories as this process sees them. An error is about a
// configuration that cannot be read: that runtime is missing.
func (o Options) Find() ([]Runtime, error) {
	found := []Runtime{{Source: "--conf-dir", BinDirs: defaultBinDirs}}
	var err error
	if o.ConfDir == "" { // else it does not matter what runtimes are configured
		found, err = find(o.Root)
	}
	for i, r := range found {
		found[i] = r.in(o.Root)
		if o.ConfDir != "" {
			found[i].ConfDir = o.ConfDir
		}
		if o.BinDirs != nil {
			found[i].BinDirs = o.BinDirs
		}
	}
	return found, err
}

// find returns the runtimes that are configured or installed below root, or one without a name.
func find(root string) (found []Runtime, err error) {
	ofContainerd, errContainerd := findContainerd(root)
	ofCRIO, errCRIO := findCRIO(root)
	found = append(ofContainerd, ofCRIO...)
	if err = errors.Join(errContainerd, errCRIO); len(found) == 0 && err == nil {
		found = []Runtime{{ConfDir: defaultConfDir, BinDirs: defaultBinDirs}}
	}
	return found, err
}

// in returns a runtime whose directories are below root.
func (r Runtime) in(root string) Runtime {
	r.ConfDir = filepath.Join(root, r.ConfDir)
	r.BinDirs = slices.Clone(r.BinDirs)
	for i, dir := range r.BinDirs {
		r.BinDirs[i] = filepath.Join(root, dir)
	}
	return r
}

func exists(root string, files ...string) bool {
	return slices.ContainsFunc(files, func(file string) bool {
		_, err := os.Stat(filepath.Join(root, file))
		return err == nil
	})
}

// readFile reads a file that may be missing.
func readFile(root, file string) (text string, found bool, err error) {
	content, err := os.ReadFile(filepath.Join(root, file))
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	return string(content), err == nil, err
}

// File is a network configuration in a runtime's directory.
type File struct {
	Path string
	List *libcni.NetworkConfigList // nil where it is not valid
	Err  error
}

// Files returns the configurations in a runtime's directory, in the order in which it looks at them.
func (r Runtime) Files() ([]File, error) {
	paths, err := libcni.ConfFiles(r.ConfDir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, fmt.Errorf("list the network configurations in %s: %w", r.ConfDir, err)
	}
	slices.Sort(paths)
	var files []File
	for _, path := range paths {
		list, err := readList(path)
		files = append(files, File{path, list, err})
	}
	return files, nil
}

// readList reads a list, or a single configuration as a list.
func readList(path string) (*libcni.NetworkConfigList, error) {
	if strings.HasSuffix(path, ".conflist") {
		return libcni.NetworkConfFromFile(path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	single, err := libcni.NetworkPluginConfFromBytes(text)
	if err != nil {
		return nil, fmt.Errorf("%w (a list belongs in a file that ends in .conflist)", err)
	}
	//lint:ignore SA1019 runtimes still read single configurations, by this function
	return libcni.ConfListFromConf(single)
}

// Takes returns the file that the runtime takes, which need not be valid, or nil.
func (r Runtime) Takes(files []File) *File {
	for i, f := range files {
		switch {
		case f.List == nil && r.SkipsInvalid:
		case r.Network != "" && f.List != nil && f.List.Name != r.Network:
		default:
			return &files[i]
		}
	}
	return nil
}

// Binary returns the file of a plugin, or "" where the runtime does not find one that it can execute.
func (r Runtime) Binary(plugin string) string {
	for _, dir := range r.BinDirs {
		path := filepath.Join(dir, plugin)
		info, err := os.Stat(path)
		if err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return ""
}
