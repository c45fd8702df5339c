// Package containers finds the names that runtimes gave their containers.
//
// A network's plugin gets a container's ID. Its name is in libcni's cache, which has the CNI_ARGS of each container:
// Kubernetes sends a pod's namespace and name, and podman a container's name. nerdctl sends no name, but containerd
// has it in a label.
package containers

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

// DefaultCacheDir is libcni's: the directory "results" is below it.
const DefaultCacheDir = "/var/lib/cni"

// containerdTimeout bounds the wait for containerd, for all containers together.
const containerdTimeout = 2 * time.Second

// Attachments lists all attachments with their containers' names, as far as they are found. dataDir is the directory of
// the records. What cannot be read is missing, and in the error.
func Attachments(dataDir, cacheDir string) ([]*admin.Attachment, error) {
	all, err := admin.Attachments(dataDir)
	if all == nil {
		return nil, err
	}
	names := Names(context.Background(), cacheDir)
	for _, a := range all {
		a.Name = names[a.ContainerID]
	}
	return all, err
}

// Names returns the names of all containers in libcni's cache, by their IDs.
func Names(ctx context.Context, cacheDir string) map[string]string {
	ctx, cancel := context.WithTimeout(ctx, containerdTimeout)
	defer cancel()
	label := func(namespace, id string) string { return labelOf(ctx, namespace, id) }
	names := map[string]string{}
	for _, dir := range []string{cacheDir, filepath.Join(cacheDir, "cache")} { // the second one is that of old versions
		cached, _ := Cached(dir) // what can be read
		for _, c := range cached {
			if _, isKnown := names[c.ContainerID]; !isKnown {
				names[c.ContainerID] = nameOf(c, label)
			}
		}
	}
	return names
}

// Cached returns the attachments in libcni's cache.
func Cached(dir string) ([]*libcni.NetworkAttachment, error) {
	all, err := libcni.NewCNIConfigWithCacheDir(nil, dir, nil).GetCachedAttachments("")
	if err != nil {
		return nil, fmt.Errorf("read libcni's cache: %w", err)
	}
	return all, nil
}

// nameOf returns the name of a container, such as web, or shop/web-0 in Kubernetes, or "". label returns the name in
// containerd's label of a container of nerdctl.
func nameOf(cached *libcni.NetworkAttachment, label func(namespace, id string) string) string {
	args := map[string]string{}
	for _, arg := range cached.CniArgs {
		args[arg[0]] = arg[1]
	}
	namespace, name := args["K8S_POD_NAMESPACE"], args["K8S_POD_NAME"]
	switch {
	case name != "" && namespace != "":
		return namespace + "/" + name
	case name != "":
		return name
	}
	if namespace, id, ok := CutNerdctl(cached.ContainerID); ok {
		return label(namespace, id)
	}
	return ""
}

// nerdctlID is the form of the ID that nerdctl sends: containerd's namespace and ID.
var nerdctlID = regexp.MustCompile(`^([A-Za-z0-9._-]+)-([0-9a-f]{64})$`)

// CutNerdctl cuts an ID that nerdctl has sent into containerd's namespace and ID.
func CutNerdctl(containerID string) (namespace, id string, ok bool) {
	parts := nerdctlID.FindStringSubmatch(containerID)
	if parts == nil {
		return "", "", false
	}
	return parts[1], parts[2], true
}

// labels are those that containerd has returned, for commands that read names again and again.
var labels sync.Map

// labelOf asks containerd for the name of a container of nerdctl. It returns "" where containerd does not answer.
func labelOf(ctx context.Context, namespace, id string) string {
	if name, ok := labels.Load(namespace + "/" + id); ok {
		return name.(string)
	}
	cmd := exec.CommandContext(ctx, "ctr", "--namespace", namespace, "containers", "info", id)
	cmd.WaitDelay = containerdTimeout
	text, err := cmd.Output()
	var container struct{ Labels map[string]string }
	if err != nil || json.Unmarshal(text, &container) != nil {
		return ""
	}
	name := container.Labels["nerdctl/name"]
	labels.Store(namespace+"/"+id, name)
	return name
}
