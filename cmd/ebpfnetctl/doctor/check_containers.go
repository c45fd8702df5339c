package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
)

// lookContainers compares containers with what ADD gave them, as CHECK does. Configuration and result of each are in
// libcni's cache. What `ebpfnetctl repair` fixes, other checks find.
func lookContainers(ctx context.Context, h *host) (findings []Finding, err error) {
	cached, err := h.cachedContainers()
	if err != nil {
		return nil, err
	}
	if h.datapath == nil {
		return []Finding{good("nothing is loaded yet")}, nil
	}
	unknown, present := 0, admin.ByOwner(h.attachments)
	for _, a := range h.attachments {
		if cached[a.Owner] == nil && !a.Dead {
			unknown++
		}
	}
	found := map[string][]string{} // differences, and the containers that have them
	for owner, attachment := range cached {
		differences, errCheck := h.differences(ctx, attachment, present[owner])
		if errors.Is(errCheck, libcni.ErrorCheckNotSupp) {
			unknown++
			continue
		}
		if later, errCache := h.cachedContainers(); (errCheck != nil || len(differences) > 0) && errCache == nil && later[owner] == nil {
			continue // a DEL has removed it meanwhile
		}
		err = errors.Join(err, errCheck)
		for _, what := range differences {
			found[what] = append(found[what], strings.Join([]string{attachment.Network, attachment.ContainerID, attachment.IfName}, "/"))
		}
	}
	for what, containers := range found {
		slices.Sort(containers)
		findings = append(findings, wrong("start the container again (DEL and ADD)", "%s: %s", list(containers), what))
	}
	slices.SortFunc(findings, func(a, b Finding) int { return strings.Compare(a.What, b.What) })
	if unknown > 0 {
		findings = append(findings, good("not compared, because libcni's cache has no result of CNI 0.4.0 or newer: %d containers", unknown))
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "each container has what ADD gave it"), nil
}

// cachedContainers returns the attachments of ebpfnet in libcni's cache by their owners.
func (h *host) cachedContainers() (map[string]*libcni.NetworkAttachment, error) {
	all, err := containers.Cached(h.CacheDir)
	if err != nil {
		return nil, err
	}
	cached := map[string]*libcni.NetworkAttachment{}
	for _, a := range all {
		if hasOurs(a) {
			cached[maps.Attachment{Network: a.Network, ContainerID: a.ContainerID, IfName: a.IfName}.Owner().String()] = a
		}
	}
	return cached, nil
}

// hasOurs reports whether our plugin is in the list of a cached attachment.
func hasOurs(a *libcni.NetworkAttachment) bool {
	list, err := libcni.NetworkConfFromBytes(a.Config)
	isOurs := func(p *libcni.PluginConfig) bool { return p.Network.Type == config.PluginType }
	return err == nil && slices.ContainsFunc(list.Plugins, isOurs)
}

// differences runs CHECK for a container. One that is gone has none: the check reservations finds what it has left.
func (h *host) differences(ctx context.Context, cached *libcni.NetworkAttachment, present *admin.Attachment) (found []string, err error) {
	netns, done, err := namespaceOf(cached, present)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return nil, err
	}
	defer done()
	list, err := libcni.NetworkConfFromBytes(cached.Config)
	if err != nil {
		return nil, err
	}
	list.DisableCheck = false // that is for the CHECK of other plugins
	run := &inProcess{}
	var binDirs []string // of the IPAM plugins that ours executes
	for _, r := range h.runtimes {
		binDirs = append(binDirs, r.BinDirs...)
	}
	err = libcni.NewCNIConfigWithCacheDir(binDirs, h.CacheDir, run).CheckNetworkList(ctx, list, &libcni.RuntimeConf{
		ContainerID: cached.ContainerID, NetNS: netns, IfName: cached.IfName, Args: cached.CniArgs, CapabilityArgs: cached.CapabilityArgs,
	})
	if err != nil {
		return nil, fmt.Errorf("compare %s %s %s: %w", cached.Network, cached.ContainerID, cached.IfName, err)
	}
	for _, difference := range run.differences {
		if !strings.HasSuffix(difference.Error(), plugin.Repairable) {
			found = append(found, difference.Error())
		}
	}
	return found, nil
}

// namespaceOf returns the file of a container's network namespace, which old versions of libcni do not keep. The error
// wraps fs.ErrNotExist if the container is gone.
func namespaceOf(cached *libcni.NetworkAttachment, present *admin.Attachment) (path string, done func(), err error) {
	if cached.NetNS != "" {
		_, err := os.Stat(cached.NetNS)
		return cached.NetNS, func() {}, err
	}
	if present == nil || present.Dead {
		return "", nil, fs.ErrNotExist
	}
	ns, err := admin.NamespaceOf(present)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d", ns), func() { ns.Close() }, nil
}

// inProcess runs our plugin's CHECK in this process, and no other plugin. It implements libcni's invoke.Exec.
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
	call, err := cni.QuietCall(&skel.CmdArgs{
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
	p.differences, err = plugin.New().Differences(ctx, call)
	return nil, err
}
