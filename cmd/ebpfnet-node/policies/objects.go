package policies

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/maps"
)

// Cluster is what the API server says.
type Cluster struct {
	Policies        []*networkingv1.NetworkPolicy
	ClusterPolicies []*api.ClusterNetworkPolicy
	Namespaces      map[string]labels.Set // their labels, by name
	Modes           map[string]string     // ModeAnnotation of those that have it
	Pods            []*Pod                // of this node, and of others if State.NeedsPeers
	Nodes           []Node                // while there is a ClusterNetworkPolicy
}

// ModeAnnotation of a namespace says whether its policies are enforced, or what they do not admit passes, and is reported.
const ModeAnnotation = "ebpfnet/policy-mode"

// The modes.
const (
	enforceMode = "enforce"
	auditMode   = "audit"
)

// Pod is what policies need of a pod. It must not change: Compile keeps answers by its pointer.
type Pod struct {
	UID             string // as the runtime knows it
	Namespace, Name string
	Node            string
	Created         time.Time
	Labels          labels.Set
	Addresses       []netip.Addr
	Ports           []NamedPort
	HostNetwork     bool
	IsMirror        bool // it claims to mirror the static pod with its UID
	IsDone          bool // it has succeeded or failed, so its addresses may be another pod's
}

// NamedPort is a port of a container that has a name.
type NamedPort struct {
	Name     string
	Protocol maps.Protocol
	Port     uint16
}

// mirrorOf has the UID of a static pod that an object in the API mirrors.
const mirrorOf = "kubernetes.io/config.mirror"

// PodOf returns what policies need of a Pod object.
func PodOf(o *corev1.Pod) *Pod {
	pod := &Pod{
		UID: string(o.UID), Namespace: o.Namespace, Name: o.Name, Node: o.Spec.NodeName,
		Created: o.CreationTimestamp.Time, Labels: o.Labels, HostNetwork: o.Spec.HostNetwork,
		IsDone: o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed,
	}
	if uid := o.Annotations[mirrorOf]; uid != "" {
		pod.UID, pod.IsMirror = uid, true
	}
	texts := []string{o.Status.PodIP}
	for _, ip := range o.Status.PodIPs {
		texts = append(texts, ip.IP)
	}
	for _, text := range texts {
		addr, err := netip.ParseAddr(text)
		if addr = addr.Unmap(); err == nil && !slices.Contains(pod.Addresses, addr) {
			pod.Addresses = append(pod.Addresses, addr)
		}
	}
	for _, container := range o.Spec.InitContainers {
		if policy := container.RestartPolicy; policy != nil && *policy == corev1.ContainerRestartPolicyAlways {
			pod.addPorts(container)
		}
	}
	for _, container := range o.Spec.Containers {
		pod.addPorts(container)
	}
	return pod
}

func (p *Pod) addPorts(container corev1.Container) {
	for _, port := range container.Ports {
		protocol, ok := protocolOf(&port.Protocol)
		if ok && port.Name != "" && isPort(port.ContainerPort) {
			p.Ports = append(p.Ports, NamedPort{port.Name, protocol, uint16(port.ContainerPort)})
		}
	}
}

// portsNamed returns the pod's ports that have one of the names, sorted.
func (p *Pod) portsNamed(names map[portName]bool) (ports []NamedPort) {
	if len(names) == 0 {
		return nil
	}
	for _, port := range p.Ports {
		if names[portName{port.Name, port.Protocol}] {
			ports = append(ports, port)
		}
	}
	slices.SortFunc(ports, func(a, b NamedPort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	return ports
}

// isPolicied reports whether policies of its namespace may select the pod.
func (p *Pod) isPolicied() bool { return !p.HostNetwork && !p.IsDone }

// protocolOf returns a protocol by its name; by default TCP.
func protocolOf(name *corev1.Protocol) (maps.Protocol, bool) {
	if name == nil || *name == "" {
		return maps.TCP, true
	}
	protocol, ok := map[corev1.Protocol]maps.Protocol{
		corev1.ProtocolTCP: maps.TCP, corev1.ProtocolUDP: maps.UDP, corev1.ProtocolSCTP: maps.SCTP,
	}[*name]
	return protocol, ok
}

func isPort(number int32) bool { return 0 < number && number <= lastPort }

const lastPort = 65535

// holders are the pods that have an address, the newest first. Those that have ended, and of the host's network, have none.
type holders map[netip.Addr][]*Pod

func (h holders) add(pod *Pod) {
	if !pod.isPolicied() {
		return
	}
	for _, addr := range pod.Addresses {
		at := slices.IndexFunc(h[addr], pod.isNewer)
		if at < 0 {
			at = len(h[addr])
		}
		h[addr] = slices.Insert(h[addr], at, pod)
	}
}

func (h holders) remove(pod *Pod) {
	for _, addr := range pod.Addresses {
		if h[addr] = slices.DeleteFunc(h[addr], func(other *Pod) bool { return other == pod }); len(h[addr]) == 0 {
			delete(h, addr)
		}
	}
}

func (p *Pod) isNewer(other *Pod) bool {
	if !p.Created.Equal(other.Created) {
		return p.Created.After(other.Created)
	}
	return p.UID > other.UID
}
