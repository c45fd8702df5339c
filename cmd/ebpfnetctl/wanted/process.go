package wanted

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/runtimes"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/config"
)

// pluginDirs are where IPAM plugins are that our plugin executes.
func pluginDirs() []string {
	if path := os.Getenv("CNI_PATH"); path != "" {
		return filepath.SplitList(path)
	}
	return runtimes.DefaultBinDirs
}

// inProcess runs our plugin's CHECK in this process, and no other plugin. It implements libcni's
// invoke.Exec.
type inProcess struct {
	version.PluginDecoder
	differences []error
}

// FindInPath implements invoke.Exec: nothing is looked for.
func (*inProcess) FindInPath(plugin string, _ []string) (string, error) { return plugin, nil }

// ExecPlugin implements invoke.Exec.
func (p *inProcess) ExecPlugin(ctx context.Context, name string, stdin []byte, environ []string) ([]byte, error) {
	if name != config.PluginType {
		return nil, nil
	}
	variables := map[string]string{}
	for _, variable := range environ {
		name, value, _ := strings.Cut(variable, "=")
		variables[name] = value
		if strings.HasPrefix(name, "CNI_") { // for IPAM plugins that ours executes
			os.Setenv(name, value)
		}
	}
	call, err := config.NewCall(&skel.CmdArgs{
		ContainerID: variables["CNI_CONTAINERID"],
		Netns:       variables["CNI_NETNS"],
		IfName:      variables["CNI_IFNAME"],
		Args:        variables["CNI_ARGS"],
		Path:        variables["CNI_PATH"],
		StdinData:   stdin,
	})
	if err != nil {
		return nil, err
	}
	p.differences, err = plugin.New().Differences(ctx, &cni.Call{Call: call, Log: slog.New(slog.DiscardHandler)})
	return nil, err
}
