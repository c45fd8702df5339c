package chart

import (
	"reflect"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

// TestPodSecurity: what the agent asks for beyond the level "restricted" is what the manifest says why.
func TestPodSecurity(t *testing.T) {
	want := []string{
		`forbidden AppArmor profile: pod must not set AppArmor profile type to "Unconfined"`,
		`host namespaces: hostNetwork=true`,
		`probe or lifecycle host: container "agent" uses probe or lifecycle host "127.0.0.1"`,
		`restricted volume types: volumes "conflist", "plugins", "state", "addresses", "bpf" use restricted volume type "hostPath"`,
		`runAsNonRoot != true: pod or container "agent" must set securityContext.runAsNonRoot=true`,
		`runAsUser=0: pod must not set runAsUser=0`,
		`seLinuxOptions: pod set forbidden securityContext.seLinuxOptions: type "spc_t"`,
		`unrestricted capabilities: container "agent" must not include "BPF", "NET_ADMIN", "PERFMON" in securityContext.capabilities.add`,
	}
	set := daemonSet(t, "")
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	latest := api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()}
	var got []string
	for _, result := range evaluator.EvaluatePod(latest, &metav1.ObjectMeta{}, &set.Spec.Template.Spec) {
		if !result.Allowed {
			got = append(got, result.ForbiddenReason+": "+result.ForbiddenDetail)
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func daemonSet(t *testing.T, values string) *appsv1.DaemonSet {
	t.Helper()
	set := &appsv1.DaemonSet{}
	decode(t, mustRender(t, values)["DaemonSet"], set)
	return set
}

// TestToken: only pods that ask the API have one.
func TestToken(t *testing.T) {
	var account corev1.ServiceAccount
	decode(t, mustRender(t, "")["ServiceAccount"], &account)
	if mounted := account.AutomountServiceAccountToken; mounted == nil || *mounted {
		t.Error("got the account's token in all its pods, want none")
	}
	for values, want := range map[string]bool{"": true, "uninstall: true": false} {
		if got := daemonSet(t, values).Spec.Template.Spec.AutomountServiceAccountToken; got == nil || *got != want {
			t.Errorf("%q: got token %v, want %v", values, got, want)
		}
	}
}

// TestContainer: one, with the least that TestRightsOfAgent of test/cluster shows to be needed.
func TestContainer(t *testing.T) {
	for _, values := range []string{"", "uninstall: true"} {
		spec := daemonSet(t, values).Spec.Template.Spec
		if len(spec.Containers) != 1 || len(spec.InitContainers)+len(spec.EphemeralContainers) > 0 {
			t.Fatalf("got %+v, want one container", spec)
		}
		no, yes := false, true
		want := &corev1.SecurityContext{
			Privileged: &no, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
			Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_ADMIN", "BPF", "PERFMON"}},
		}
		if got := spec.Containers[0].SecurityContext; !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
		if spec.HostPID || spec.HostIPC || *spec.EnableServiceLinks {
			t.Errorf("got %+v, want the host's network alone, and no addresses of services", spec)
		}
		if r := spec.Containers[0].Resources; r.Requests.Memory().IsZero() || r.Requests.Cpu().IsZero() || len(r.Limits) > 0 {
			t.Errorf("got %+v, want requests, and no limit: the datapath's maps count in it", r)
		}
	}
}

// TestHostPaths: the agent may write to four directories of the host.
func TestHostPaths(t *testing.T) {
	spec := daemonSet(t, "").Spec.Template.Spec
	paths := map[string]string{}
	for _, volume := range spec.Volumes {
		paths[volume.Name] = ""
		if volume.HostPath != nil {
			paths[volume.Name] = volume.HostPath.Path
		}
	}
	var writable []string
	for _, mount := range spec.Containers[0].VolumeMounts {
		if path := paths[mount.Name]; path != "" {
			if path != mount.MountPath {
				t.Errorf("%s is at %s: what the agent writes for the plugin names the host's path", path, mount.MountPath)
			}
			if !mount.ReadOnly {
				writable = append(writable, path)
			}
		}
		delete(paths, mount.Name)
	}
	if len(paths) > 0 {
		t.Errorf("got volumes that are mounted nowhere: %v", paths)
	}
	want := []string{"/etc/cni/net.d", "/opt/cni/bin", "/run/ebpfnet-node", "/sys/fs/bpf"}
	if slices.Sort(writable); !slices.Equal(writable, want) {
		t.Errorf("got %q, want %q", writable, want)
	}
}
