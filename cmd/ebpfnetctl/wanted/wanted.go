// Package wanted compares what containers have with what they were given, as CHECK does. It takes what is
// wanted from libcni's cache, where runtimes keep the configuration and the result of each container.
//
// It may import cmd/ebpfnetctl/runtimes, maps, plugin, plugin/cni, plugin/config and plugin/operator.
package wanted

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// DefaultCacheDir is libcni's: the directory "results" is below it.
const DefaultCacheDir = "/var/lib/cni"

// Difference is something that is not as ADD left it.
type Difference struct {
	What       string            `json:"what"`
	Remedy     Remedy            `json:"remedy"`
	Containers []maps.Attachment `json:"containers"` // that have it
}

// Remedy is what ends a difference.
type Remedy string

// The remedies.
const (
	Repair  Remedy = "repair"      // ebpfnetctl repair, while the container runs
	Release Remedy = "DEL or GC"   // the container is gone
	Anew    Remedy = "DEL and ADD" // nothing less
)

const gone = "the container is gone, and entries or reservations are left"

// Found is what All has found.
type Found struct {
	Differences []Difference
	// NotCompared are containers of which nobody knows what is wanted, and why.
	NotCompared []string
}

// All compares all attachments, and those of ebpfnet in the cache that the host does not have any more. It finds
// nothing wrong with one that a DEL removes meanwhile. An error is about what could not be read; the result is nil
// if there is nothing else.
func All(ctx context.Context, dataDir, cacheDir string) (*Found, error) {
	cached, err := cachedAttachments(cacheDir) // DEL takes it from the cache last, so it is read first
	if err != nil {
		return nil, err
	}
	attachments, err := operator.Attachments(dataDir)
	if attachments == nil {
		return nil, err
	}
	found := &Found{}
	var compared []*comparison
	for _, a := range attachments {
		wanted, ok := cached[a.Owner]
		delete(cached, a.Owner)
		switch {
		case ok:
			compared = append(compared, compare(ctx, wanted, a, cacheDir))
		case a.Dead:
			found.add(a.Attachment, Release, gone+" (owner "+a.Owner+")")
		default:
			found.NotCompared = append(found.NotCompared, title(a)+": libcni's cache has no result of it")
		}
	}
	for _, wanted := range cached {
		compared = append(compared, compare(ctx, wanted, nil, cacheDir))
	}
	err = errors.Join(err, found.addRemaining(compared, cacheDir))
	found.sort()
	return found, err
}

// comparison is what was found out about one attachment in the cache.
type comparison struct {
	Found
	owner string
	err   error
}

func compare(ctx context.Context, wanted *libcni.NetworkAttachment, present *operator.Attachment, cacheDir string) *comparison {
	c := &comparison{owner: ownerOf(wanted)}
	c.err = c.check(ctx, wanted, present, cacheDir)
	return c
}

// addRemaining adds what was found out, but not of attachments that have left the cache by now.
func (f *Found) addRemaining(compared []*comparison, cacheDir string) error {
	cached, err := cachedAttachments(cacheDir)
	if err != nil {
		return err
	}
	for _, c := range compared {
		if cached[c.owner] == nil {
			continue
		}
		err = errors.Join(err, c.err)
		f.NotCompared = append(f.NotCompared, c.NotCompared...)
		for _, d := range c.Differences {
			f.add(d.Containers[0], d.Remedy, d.What)
		}
	}
	return err
}

// title names an attachment in a message.
func title(a *operator.Attachment) string {
	return cmp.Or(strings.Trim(a.Network+" "+a.ContainerID+" "+a.IfName, " "), "owner "+a.Owner)
}

// cachedAttachments returns the attachments of ebpfnet in the cache by their owners.
func cachedAttachments(cacheDir string) (map[string]*libcni.NetworkAttachment, error) {
	all, err := libcni.NewCNIConfigWithCacheDir(nil, cacheDir, nil).GetCachedAttachments("")
	if err != nil {
		return nil, fmt.Errorf("read libcni's cache: %w", err)
	}
	cached := map[string]*libcni.NetworkAttachment{}
	for _, a := range all {
		list, err := libcni.NetworkConfFromBytes(a.Config)
		isOurs := func(p *libcni.PluginConfig) bool { return p.Network.Type == config.PluginType }
		if err == nil && slices.ContainsFunc(list.Plugins, isOurs) {
			cached[ownerOf(a)] = a
		}
	}
	return cached, nil
}

func attachmentOf(a *libcni.NetworkAttachment) maps.Attachment {
	return maps.Attachment{Network: a.Network, ContainerID: a.ContainerID, IfName: a.IfName}
}

func ownerOf(a *libcni.NetworkAttachment) string {
	return attachmentOf(a).Owner().String()
}

// check adds the differences of one attachment. present is nil where the host has nothing of it.
func (f *Found) check(ctx context.Context, wanted *libcni.NetworkAttachment, present *operator.Attachment, cacheDir string) error {
	attachment := attachmentOf(wanted)
	netns, closeNetns, err := namespaceOf(wanted, present)
	if errors.Is(err, fs.ErrNotExist) {
		f.add(attachment, Release, gone)
		return nil
	}
	if err != nil {
		return err
	}
	defer closeNetns()
	list, err := libcni.NetworkConfFromBytes(wanted.Config)
	if err != nil {
		return err
	}
	list.DisableCheck = false // that is for the CHECK of other plugins
	run := &inProcess{}
	err = libcni.NewCNIConfigWithCacheDir(pluginDirs(), cacheDir, run).CheckNetworkList(ctx, list, &libcni.RuntimeConf{
		ContainerID:    wanted.ContainerID,
		NetNS:          netns,
		IfName:         wanted.IfName,
		Args:           wanted.CniArgs,
		CapabilityArgs: wanted.CapabilityArgs,
	})
	for _, difference := range run.differences {
		what, isRepairable := strings.CutSuffix(difference.Error(), plugin.Repairable)
		f.add(attachment, map[bool]Remedy{true: Repair, false: Anew}[isRepairable], what)
	}
	if errors.Is(err, libcni.ErrorCheckNotSupp) {
		f.NotCompared = append(f.NotCompared, fmt.Sprintf("%s %s %s: %v", wanted.Network, wanted.ContainerID, wanted.IfName, err))
		return nil
	}
	if err != nil {
		return fmt.Errorf("compare %s %s %s: %w", wanted.Network, wanted.ContainerID, wanted.IfName, err)
	}
	return nil
}

// namespaceOf returns the file of a container's network namespace, which old versions of libcni do not
// keep. The error wraps fs.ErrNotExist where the container is gone.
func namespaceOf(wanted *libcni.NetworkAttachment, present *operator.Attachment) (path string, done func(), err error) {
	if wanted.NetNS != "" {
		_, err := os.Stat(wanted.NetNS)
		return wanted.NetNS, func() {}, err
	}
	if present == nil || present.Dead {
		return "", nil, fs.ErrNotExist
	}
	ns, err := operator.NamespaceOf(present)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d", ns), func() { ns.Close() }, nil
}

// add adds a difference, or one more container that has it.
func (f *Found) add(attachment maps.Attachment, remedy Remedy, what string) {
	for i := range f.Differences {
		if f.Differences[i].What == what {
			f.Differences[i].Containers = append(f.Differences[i].Containers, attachment)
			return
		}
	}
	f.Differences = append(f.Differences, Difference{what, remedy, []maps.Attachment{attachment}})
}

// sort puts what many containers have, and so the host, before what is of one.
func (f *Found) sort() {
	name := func(a maps.Attachment) string { return a.Network + "/" + a.ContainerID + "/" + a.IfName }
	for _, d := range f.Differences {
		slices.SortFunc(d.Containers, func(a, b maps.Attachment) int { return cmp.Compare(name(a), name(b)) })
	}
	slices.SortFunc(f.Differences, func(a, b Difference) int {
		return cmp.Or(cmp.Compare(len(b.Containers), len(a.Containers)), cmp.Compare(name(a.Containers[0]), name(b.Containers[0])), cmp.Compare(a.What, b.What))
	})
	slices.Sort(f.NotCompared)
}
