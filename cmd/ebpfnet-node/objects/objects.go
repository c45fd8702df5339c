// Package objects watches what NetworkPolicies need: the policies, and while there is one, the namespaces and this node's
// pods. It watches pods of other nodes only while rules name pods by labels. ClusterNetworkPolicies are policies, too, where
// their CRD is installed, and nodes matter while there is one.
package objects

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/connrotation"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/watch"
)

// Source has the objects. Its methods are for one goroutine, except Run and Reconnect.
type Source struct {
	NeedsNodes bool // also without a ClusterNetworkPolicy

	dialer  *connrotation.Dialer
	changed chan time.Time
	started chan func() // for Run

	policies    *source[*networkingv1.NetworkPolicy]
	installed   *source[string] // the CRD of clusterWide
	clusterWide *source[*api.ClusterNetworkPolicy]
	namespaces  *source[namespace]
	nodes       *source[policies.Node]
	own, peers  *source[*policies.Pod]
}

// namespace is what policies need of one.
type namespace struct {
	name   string
	labels labels.Set
	mode   string // of its policies
}

// source is a watcher that runs while it is needed.
type source[T any] struct {
	make func() *watch.Watcher[T]
	now  *watch.Watcher[T] // nil: not needed
	stop context.CancelFunc
}

// New returns the objects of an API server for the node with that name. Backoff is nil for client-go's.
func New(config *rest.Config, node string, backoff *wait.Backoff) (*Source, error) {
	config, dialer := watch.Dial(config)
	core, errCore := watch.Client(config, corev1.SchemeGroupVersion, runtime.ContentTypeProtobuf, map[string]runtime.Object{
		"Pod": &corev1.Pod{}, "PodList": &corev1.PodList{}, "Namespace": &corev1.Namespace{}, "NamespaceList": &corev1.NamespaceList{},
		"Node": &corev1.Node{}, "NodeList": &corev1.NodeList{},
	})
	networking, errNetworking := watch.Client(config, networkingv1.SchemeGroupVersion, runtime.ContentTypeProtobuf, map[string]runtime.Object{
		"NetworkPolicy": &networkingv1.NetworkPolicy{}, "NetworkPolicyList": &networkingv1.NetworkPolicyList{},
	})
	// API servers have custom resources in JSON alone.
	custom, errCustom := watch.Client(config, schema.GroupVersion(api.GroupVersion), runtime.ContentTypeJSON, map[string]runtime.Object{
		"ClusterNetworkPolicy": &api.ClusterNetworkPolicy{}, "ClusterNetworkPolicyList": &api.ClusterNetworkPolicyList{},
	})
	extensions, errExtensions := watch.Client(config, schema.GroupVersion{Group: "apiextensions.k8s.io", Version: "v1"}, runtime.ContentTypeJSON,
		map[string]runtime.Object{"CustomResourceDefinition": &metav1.PartialObjectMetadata{}, "CustomResourceDefinitionList": &metav1.PartialObjectMetadataList{}})
	if err := errors.Join(errCore, errNetworking, errCustom, errExtensions); err != nil {
		return nil, err
	}
	s := &Source{dialer: dialer, changed: make(chan time.Time, 1), started: make(chan func())}
	s.policies = newSource(networking, s.changed, backoff, watch.Kind[*networkingv1.NetworkPolicy]{
		Resource: "networkpolicies", Object: &networkingv1.NetworkPolicy{}, Read: readPolicy,
		List: func() runtime.Object { return &networkingv1.NetworkPolicyList{} },
	})
	s.installed = newSource(extensions, s.changed, backoff, watch.Kind[string]{
		Resource: "customresourcedefinitions", Object: &metav1.PartialObjectMetadata{}, Read: readName,
		Fields: "metadata.name=clusternetworkpolicies." + api.GroupName,
		List:   func() runtime.Object { return &metav1.PartialObjectMetadataList{} },
	})
	s.clusterWide = newSource(custom, s.changed, backoff, watch.Kind[*api.ClusterNetworkPolicy]{
		Resource: "clusternetworkpolicies", Object: &api.ClusterNetworkPolicy{}, Read: readClusterPolicy,
		List: func() runtime.Object { return &api.ClusterNetworkPolicyList{} },
	})
	s.nodes = newSource(core, s.changed, backoff, watch.Kind[policies.Node]{
		Resource: "nodes", Object: &corev1.Node{}, Read: readNode, List: func() runtime.Object { return &corev1.NodeList{} },
	})
	s.namespaces = newSource(core, s.changed, backoff, watch.Kind[namespace]{
		Resource: "namespaces", Object: &corev1.Namespace{}, Read: readNamespace,
		List: func() runtime.Object { return &corev1.NamespaceList{} },
	})
	pods := watch.Kind[*policies.Pod]{
		Resource: "pods", Object: &corev1.Pod{}, Read: readPod, List: func() runtime.Object { return &corev1.PodList{} },
	}
	pods.Fields = "spec.nodeName=" + node
	s.own = newSource(core, s.changed, backoff, pods)
	pods.Fields = "spec.nodeName!=" + node
	s.peers = newSource(core, s.changed, backoff, pods)
	return s, nil
}

func newSource[T any](api rest.Interface, changed chan time.Time, backoff *wait.Backoff, kind watch.Kind[T]) *source[T] {
	return &source[T]{make: func() *watch.Watcher[T] {
		watcher := watch.New(api, kind, changed)
		if backoff != nil {
			watcher.Backoff = new(*backoff) // a watcher changes it
		}
		return watcher
	}}
}

// readPolicy keeps the parts that have a meaning, so that other changes wake nobody.
func readPolicy(object any) (string, *networkingv1.NetworkPolicy) {
	o := object.(*networkingv1.NetworkPolicy)
	return keyOf(o), &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name}, Spec: o.Spec}
}

func readClusterPolicy(object any) (string, *api.ClusterNetworkPolicy) {
	o := object.(*api.ClusterNetworkPolicy)
	return o.Name, &api.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: o.Name}, Spec: o.Spec}
}

func readName(object any) (string, string) {
	name := object.(*metav1.PartialObjectMetadata).Name
	return name, name
}

func readNode(object any) (string, policies.Node) {
	o := object.(*corev1.Node)
	return o.Name, policies.NodeOf(o)
}

func readNamespace(object any) (string, namespace) {
	o := object.(*corev1.Namespace)
	return o.Name, namespace{o.Name, o.Labels, o.Annotations[policies.ModeAnnotation]}
}

func readPod(object any) (string, *policies.Pod) {
	o := object.(*corev1.Pod)
	return keyOf(o), policies.PodOf(o)
}

func keyOf(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }

// Run watches until ctx is done.
func (s *Source) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case watcher := <-s.started:
			running.Go(watcher)
		}
	}
}

// start starts watchers that are needed, and ends others.
func (s *source[T]) start(ctx context.Context, run chan<- func(), isNeeded bool) {
	switch {
	case isNeeded && s.now == nil:
		watcher := s.make()
		own, stop := context.WithCancel(ctx)
		s.now, s.stop = watcher, stop
		select {
		case run <- func() { watcher.Run(own) }:
		case <-ctx.Done():
		}
	case !isNeeded && s.now != nil:
		s.stop()
		s.now = nil
	}
}

func (s *source[T]) values() ([]T, bool) {
	if s.now == nil {
		return nil, false
	}
	return s.now.Values()
}

// Need says which objects matter: policies always, beside them the namespaces and this node's pods, and pods of other nodes.
func (s *Source) Need(ctx context.Context, pods, peers bool) {
	s.policies.start(ctx, s.started, true)
	s.installed.start(ctx, s.started, true)
	s.clusterWide.start(ctx, s.started, s.isInstalled())
	s.nodes.start(ctx, s.started, s.NeedsNodes || s.hasClusterWide())
	s.namespaces.start(ctx, s.started, pods)
	s.own.start(ctx, s.started, pods)
	s.peers.start(ctx, s.started, pods && peers)
}

// Changed says when something has first changed since the last receive.
func (s *Source) Changed() <-chan time.Time { return s.changed }

// Reconnect closes all connections. The watches continue on new ones.
func (s *Source) Reconnect() { s.dialer.CloseAll() }

// HasPolicies reports whether there is a policy. isComplete is false while that is not known.
func (s *Source) HasPolicies() (has, isComplete bool) {
	all, hasAll := s.policies.values()
	_, hasInstalled := s.installed.values()
	_, hasClusterWide := s.clusterWide.values()
	return len(all) > 0 || s.hasClusterWide(), hasAll && hasInstalled && (hasClusterWide || !s.isInstalled())
}

func (s *Source) isInstalled() bool {
	names, _ := s.installed.values()
	return len(names) > 0
}

func (s *Source) hasClusterWide() bool {
	all, _ := s.clusterWide.values()
	return len(all) > 0
}

// Cluster returns all that is known. isComplete says that nothing is missing but pods of other nodes, and hasPeers that
// these are not missing.
func (s *Source) Cluster() (cluster policies.Cluster, isComplete, hasPeers bool) {
	_, hasPolicies := s.HasPolicies()
	all, _ := s.policies.values()
	clusterWide, _ := s.clusterWide.values()
	nodes, hasNodes := s.nodes.values()
	named, hasNamespaces := s.namespaces.values()
	own, hasOwn := s.own.values()
	peers, hasPeers := s.peers.values()
	cluster = policies.Cluster{
		Policies: all, ClusterPolicies: clusterWide, Namespaces: map[string]labels.Set{}, Modes: map[string]string{},
		Pods: append(own, peers...), Nodes: nodes,
	}
	for _, n := range named {
		cluster.Namespaces[n.name] = n.labels
		if n.mode != "" {
			cluster.Modes[n.name] = n.mode
		}
	}
	return cluster, hasPolicies && hasNamespaces && hasOwn && (hasNodes || s.nodes.now == nil && len(clusterWide) == 0), hasPeers
}

// Events returns what has become of pods of other nodes since the last call. isAll says that nothing else has changed.
func (s *Source) Events() (events []policies.Event, isAll bool) {
	unchanged := []bool{ // all of them
		isUnchanged(s.policies), isUnchanged(s.installed), isUnchanged(s.clusterWide), isUnchanged(s.namespaces), isUnchanged(s.nodes), isUnchanged(s.own),
	}
	isAll = !slices.Contains(unchanged, false)
	if s.peers.now == nil {
		return nil, isAll
	}
	changes, isComplete := s.peers.now.Take()
	for _, change := range changes { // nil where there is none
		events = append(events, policies.Event{Before: change.Before, Now: change.Now})
	}
	return events, isAll && isComplete
}

// isUnchanged reports whether nothing has changed since the last call.
func isUnchanged[T any](s *source[T]) bool {
	if s.now == nil {
		return true
	}
	events, isAll := s.now.Take()
	return isAll && len(events) == 0
}

// Err returns why the API server last refused something, or nil.
func (s *Source) Err() error {
	var errs []error
	for resource, err := range map[string]error{
		"networkpolicies": s.policies.err(), "customresourcedefinitions": s.installed.err(), "clusternetworkpolicies": s.clusterWide.err(),
		"nodes": s.nodes.err(), "namespaces": s.namespaces.err(), "this node's pods": s.own.err(), "pods": s.peers.err(),
	} {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", resource, err))
		}
	}
	return errors.Join(errs...)
}

func (s *source[T]) err() error {
	if s.now == nil {
		return nil
	}
	return s.now.Err()
}
