package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	corev1 "k8s.io/api/core/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestContainer runs the agent as a kubelet would run that of the manifest, with no more rights, files and system calls
// than it has there: it syncs, its metrics know the reserved addresses, and at the end it takes everything out.
func TestContainer(t *testing.T) {
	reserved := regexp.MustCompile(`(?m)^ebpfnet_addresses_reserved\{network="pods",.*\} 1$`)
	c := newIdleCluster(t)
	n := c.nodes[0]
	c.api.Put(n.object())
	running := n.startContainer()
	n.awaitReady()
	n.addPod()
	testenv.Eventually(t, "the pod's addresses in the metrics", func() error {
		_, body, err := n.get("/metrics")
		if err == nil && !reserved.MatchString(body) {
			err = fmt.Errorf("got %s, want %s", body, reserved)
		}
		return err
	})
	testenv.NoError(t, n.pod.Del(testenv.Context(t)))
	running.kill()
	uninstalling := n.startContainer("--stay", "uninstall")
	testenv.Eventually(t, "the agent to take everything out", func() error {
		if output := uninstalling.output.String(); !strings.Contains(output, "msg=uninstalled") {
			return fmt.Errorf("got %s", output)
		}
		return nil
	})
	if plugins, err := os.ReadDir(n.binDir()); err != nil || len(plugins) > 0 {
		t.Errorf("got plugins %v (%v), want none", plugins, err)
	}
}

// TestLockedMemory starts the container under the limit of locked memory that a runtime passes on by default. Before
// Linux 5.11 maps count: the agent says so, and works by each of the cures that the manifests' README.md names.
func TestLockedMemory(t *testing.T) {
	c := newIdleCluster(t)
	first, second := c.nodes[0], c.nodes[1]
	c.api.Put(first.object(), second.object())

	running := first.startLimited()
	if !mapsAreLocked(t) {
		first.awaitReady()
		return
	}
	first.awaitUnready("no limit on locked memory")
	running.kill()
	first.startContainer()
	first.awaitReady()

	second.startLimited("CAP_SYS_RESOURCE")
	second.awaitReady()
}

// mapsAreLocked returns whether maps count as locked memory.
func mapsAreLocked(tb testenv.TB) bool {
	tb.Helper()
	kernel, err := testenv.KernelVersion()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return kernel.Less(testenv.MemoryGroups.Since)
}

// startContainer runs the manifest's container, with further arguments, by a runtime with LimitMEMLOCK=infinity where
// that matters. Elsewhere the test may lack the right to lift the limit.
func (n *node) startContainer(args ...string) *agent {
	n.t.Helper()
	spec := n.containerSpec(agentImage(n.t), args)
	if mapsAreLocked(n.t) {
		spec.Process.Rlimits = lockedMemory(math.MaxUint64)
	}
	return n.run(spec)
}

// lockedMemory returns a limit on it, in bytes.
func lockedMemory(limit uint64) []specs.POSIXRlimit {
	return []specs.POSIXRlimit{{Type: "RLIMIT_MEMLOCK", Soft: limit, Hard: limit}}
}

// startLimited runs it by a runtime with systemd's own limit, and with further capabilities.
func (n *node) startLimited(capabilities ...string) *agent {
	n.t.Helper()
	spec := n.containerSpec(agentImage(n.t), nil)
	spec.Process.Rlimits = lockedMemory(64 << 10)
	for _, set := range []*[]string{&spec.Process.Capabilities.Bounding, &spec.Process.Capabilities.Effective, &spec.Process.Capabilities.Permitted} {
		*set = slices.Concat(*set, capabilities)
	}
	return n.run(spec)
}

func (n *node) run(spec *specs.Spec) *agent {
	n.t.Helper()
	bundle := n.bundle(agentImage(n.t), spec)
	// crun wants the unified cgroups alone, though it is to make none; what ends unshare ends the container.
	const script = `{ test "$(stat --file-system --format=%T /sys/fs/cgroup)" = cgroup2fs || mount -t cgroup2 cgroup2 /sys/fs/cgroup; } && exec crun --root "$1/crun" --cgroup-manager=disabled run --bundle "$1" agent`
	return n.start(exec.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh", bundle))
}

// bundle returns a directory with what a runtime makes of the manifest: its image, its files and config.json.
func (n *node) bundle(image image, config *specs.Spec) string {
	n.t.Helper()
	dir := n.t.TempDir()
	root := filepath.Join(dir, "rootfs")
	files := n.files()
	maps.Copy(files, image.files)
	for file, content := range files {
		const executable = 0o755
		path := filepath.Join(root, file)
		testenv.Must(n.t, os.MkdirAll(filepath.Dir(path), 0o755))
		testenv.Must(n.t, os.WriteFile(path, content, executable))
	}
	spec, err := json.Marshal(config)
	testenv.Must(n.t, err)
	testenv.Must(n.t, os.WriteFile(filepath.Join(dir, "config.json"), spec, 0o600))
	return dir
}

// files are those that a kubelet makes.
func (n *node) files() map[string][]byte {
	n.t.Helper()
	var template corev1.ConfigMap
	decode(n.t, documents(n.t, "conflist.yaml")[0], &template)
	return map[string][]byte{
		"etc/ebpfnet-node/template":                           []byte(template.Data["template"]),
		"var/run/secrets/kubernetes.io/serviceaccount/token":  []byte("token"),
		"var/run/secrets/kubernetes.io/serviceaccount/ca.crt": nil,
	}
}

// refused are system calls that containerd's default profile refuses to a container with the manifest's capabilities.
var refused = []string{
	"acct", "add_key", "chroot", "clock_settime", "delete_module", "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen",
	"fspick", "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "kcmp", "kexec_file_load", "kexec_load", "keyctl",
	"mount", "mount_setattr", "move_mount", "open_by_handle_at", "open_tree", "pivot_root", "process_vm_readv", "process_vm_writev",
	"quotactl", "reboot", "request_key", "setdomainname", "sethostname", "setns", "settimeofday", "swapoff", "swapon", "syslog",
	"umount2", "unshare", "userfaultfd",
}

// containerSpec is what containerd makes of the manifest's container.
func (n *node) containerSpec(image image, args []string) *specs.Spec {
	n.t.Helper()
	pod := daemonSet(n.t).Spec.Template.Spec
	container := pod.Containers[0]
	server := net.JoinHostPort(hostOn(links[0].prefix4, routerHost).String(), strconv.Itoa(apiPort))
	spec := &specs.Spec{
		Version: "1.0.2", // which old runtimes know, too
		Root:    &specs.Root{Path: "rootfs", Readonly: *container.SecurityContext.ReadOnlyRootFilesystem},
		Process: &specs.Process{
			Cwd:             "/",
			Args:            slices.Concat(image.entrypoint, []string{"--api-server=http://" + server}, container.Args, args),
			Env:             append(image.env, "KUBERNETES_SERVICE_HOST=none", "KUBERNETES_SERVICE_PORT=1", "NODE_NAME="+n.Name),
			NoNewPrivileges: !*container.SecurityContext.AllowPrivilegeEscalation,
			User:            specs.User{UID: uint32(*pod.SecurityContext.RunAsUser), GID: uint32(*pod.SecurityContext.RunAsGroup)},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
				{Type: specs.NetworkNamespace, Path: n.Path},
			},
			MaskedPaths:   []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware"},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "mode=755"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		},
	}
	var capabilities []string
	for _, capability := range container.SecurityContext.Capabilities.Add {
		capabilities = append(capabilities, "CAP_"+string(capability))
	}
	spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities}
	if pod.SecurityContext.SeccompProfile.Type == corev1.SeccompProfileTypeRuntimeDefault {
		spec.Linux.Seccomp = &specs.LinuxSeccomp{
			DefaultAction: specs.ActAllow,
			Syscalls:      []specs.LinuxSyscall{{Names: refused, Action: specs.ActErrno}},
		}
	}
	spec.Mounts = append(spec.Mounts, n.hostPaths(pod, container)...)
	return spec
}

// hostPaths are the mounts of the host's directories. Those that other hosts of the test have, too, are this node's.
func (n *node) hostPaths(pod corev1.PodSpec, container corev1.Container) (mounts []specs.Mount) {
	n.t.Helper()
	own := map[string]string{"/etc/cni/net.d": n.dir, "/opt/cni/bin": n.binDir()}
	for _, volume := range pod.Volumes {
		if volume.HostPath == nil {
			continue
		}
		source := volume.HostPath.Path
		if dir := own[source]; dir != "" {
			source = dir
		}
		if *volume.HostPath.Type == corev1.HostPathDirectoryOrCreate {
			testenv.Must(n.t, os.MkdirAll(source, 0o755))
		}
		for _, mount := range container.VolumeMounts {
			if mount.Name == volume.Name {
				access := map[bool]string{true: "ro", false: "rw"}[mount.ReadOnly]
				mounts = append(mounts, specs.Mount{Destination: mount.MountPath, Type: "bind", Source: source, Options: []string{"rbind", "rprivate", access}})
			}
		}
	}
	return mounts
}
