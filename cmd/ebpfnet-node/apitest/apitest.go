// Package apitest is an API server for tests that lists and watches objects as a real one does, with Kubernetes' own types
// and encoding.
//
// No product code may import it.
package apitest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"
)

// Object is of one of the six kinds that the agent reads.
type Object interface {
	metav1.Object
	runtime.Object
}

// kind is a kind of objects.
type kind struct {
	schema.GroupVersionKind
	list   func() runtime.Object
	none   func() Object
	isJSON bool // as custom resources are
}

// kinds are the kinds, by the path of their list.
var kinds = map[string]kind{
	"/api/v1/nodes": {corev1.SchemeGroupVersion.WithKind("Node"),
		func() runtime.Object { return &corev1.NodeList{} }, func() Object { return &corev1.Node{} }, false},
	"/api/v1/namespaces": {corev1.SchemeGroupVersion.WithKind("Namespace"),
		func() runtime.Object { return &corev1.NamespaceList{} }, func() Object { return &corev1.Namespace{} }, false},
	"/api/v1/pods": {corev1.SchemeGroupVersion.WithKind("Pod"),
		func() runtime.Object { return &corev1.PodList{} }, func() Object { return &corev1.Pod{} }, false},
	"/apis/networking.k8s.io/v1/networkpolicies": {networkingv1.SchemeGroupVersion.WithKind("NetworkPolicy"),
		func() runtime.Object { return &networkingv1.NetworkPolicyList{} }, func() Object { return &networkingv1.NetworkPolicy{} }, false},
	"/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies": {schema.GroupVersion(api.GroupVersion).WithKind("ClusterNetworkPolicy"),
		func() runtime.Object { return &api.ClusterNetworkPolicyList{} }, func() Object { return &api.ClusterNetworkPolicy{} }, true},
	"/apis/apiextensions.k8s.io/v1/customresourcedefinitions": {
		schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"},
		func() runtime.Object { return &metav1.PartialObjectMetadataList{} }, func() Object { return &metav1.PartialObjectMetadata{} }, true},
}

func pathOf(object Object) string {
	for path, kind := range kinds {
		if fmt.Sprintf("%T", kind.none()) == fmt.Sprintf("%T", object) {
			return path
		}
	}
	panic(fmt.Sprintf("no kind for %T", object))
}

// Server is an API server. Its methods are for any goroutine.
type Server struct {
	scheme *runtime.Scheme

	mu       sync.Mutex
	streams  bool
	down     bool
	version  int
	history  []change                     // since the last call of Expire
	expired  int                          // the version of that
	objects  map[string]map[string]Object // by path and name
	watches  map[*watch]struct{}
	stalled  map[string]chan struct{} // by path
	requests []string
	bad      []string
}

// watch is one under way. Its events end with a close.
type watch struct {
	path   string
	fields fields.Selector
	events chan metav1.WatchEvent
}

// change is what became of an object, and the version that it made.
type change struct {
	version     int
	path        string
	before, now Object // nil: there was or is none
}

// New returns a server without objects.
func New() *Server {
	s := &Server{streams: true, scheme: runtime.NewScheme(), version: 100, objects: map[string]map[string]Object{}, watches: map[*watch]struct{}{},
		stalled: map[string]chan struct{}{}}
	for path := range kinds {
		s.objects[path] = map[string]Object{}
	}
	if err := errors.Join(corev1.AddToScheme(s.scheme), networkingv1.AddToScheme(s.scheme)); err != nil {
		panic(err)
	}
	return s
}

// ServeHTTP answers a list, or a watch until that ends.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	initial := query.Get("sendInitialEvents") == "true"
	selector, err := fields.ParseSelector(query.Get("fieldSelector"))
	s.await(r)
	switch down, streams := s.record(r); {
	case down || err != nil || kinds[r.URL.Path].none == nil:
		s.refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
	case query.Get("watch") == "":
		s.list(w, r.URL.Path, selector, query)
	case initial && !streams:
		s.refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	default:
		s.watch(w, r, selector, initial)
	}
}

// await returns when requests of the path do not stall, or the client is gone.
func (s *Server) await(r *http.Request) {
	s.mu.Lock()
	stalled := s.stalled[r.URL.Path]
	s.mu.Unlock()
	if stalled != nil {
		select {
		case <-stalled:
		case <-r.Context().Done():
		}
	}
}

// Stall has new requests of a path get no answer until release is called.
func (s *Server) Stall(path string) (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stalled := make(chan struct{})
	s.stalled[path] = stalled
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.stalled, path)
		close(stalled)
	}
}

func (s *Server) record(r *http.Request) (down, streams bool) {
	const ofWatch = ";stream=watch"

	s.mu.Lock()
	defer s.mu.Unlock()
	query := r.URL.Query()
	s.requests = append(s.requests, fmt.Sprintf("%s %s watch=%s stream=%s", r.Method, r.URL.Path, query.Get("watch"), query.Get("sendInitialEvents")))
	if accept := strings.TrimSuffix(r.Header.Get("Accept"), ofWatch); accept != contentOf(r.URL.Path) {
		s.bad = append(s.bad, fmt.Sprintf("accepts %q, want %s alone", accept, contentOf(r.URL.Path)))
	}
	if r.Method != http.MethodGet || kinds[r.URL.Path].none == nil {
		s.bad = append(s.bad, fmt.Sprintf("%s %s, want only what the agent has rights for", r.Method, r.URL.Path))
	}
	return s.down, s.streams
}

// Requests returns all requests so far, and what none of them should have asked.
func (s *Server) Requests() (all, bad []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.requests...), append([]string(nil), s.bad...)
}

func (s *Server) refuse(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	w.WriteHeader(code)
	_, _ = w.Write(s.encode(&metav1.Status{Status: metav1.StatusFailure, Reason: reason, Code: int32(code)}, corev1.SchemeGroupVersion.WithKind("Status")))
}

// list answers with a page. A list of any version comes from the cache, which has no pages.
func (s *Server) list(w http.ResponseWriter, path string, selector fields.Selector, query url.Values) {
	s.mu.Lock()
	limit, err := strconv.Atoi(query.Get("limit"))
	if err != nil || query.Get("resourceVersion") == "0" {
		limit = len(s.objects[path])
	}
	var items []runtime.Object
	last, more := "", ""
	for _, name := range slices.Sorted(maps.Keys(s.objects[path])) {
		if object := s.objects[path][name]; name <= query.Get("continue") || !isSelected(selector, object) {
			continue
		} else if len(items) == limit {
			more = last
			break
		} else {
			items, last = append(items, object), name
		}
	}
	list := kinds[path].list()
	if err := meta.SetList(list, items); err != nil {
		panic(err)
	}
	about, _ := meta.ListAccessor(list)
	about.SetResourceVersion(fmt.Sprint(s.version))
	about.SetContinue(more)
	encoded := s.encodeFor(path, list, kinds[path].GroupVersion().WithKind(kinds[path].Kind+"List"))
	s.mu.Unlock()
	w.Header().Set("Content-Type", contentOf(path))
	_, _ = w.Write(encoded)
}

// isSelected reports whether a selector of fields matches.
func isSelected(selector fields.Selector, object Object) bool {
	set := fields.Set{"metadata.name": object.GetName()}
	if pod, ok := object.(*corev1.Pod); ok {
		set["spec.nodeName"] = pod.Spec.NodeName
	}
	return selector.Matches(set)
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request, selector fields.Selector, initial bool) {
	watch, first := s.begin(&watch{path: r.URL.Path, fields: selector}, r.URL.Query().Get("resourceVersion"), initial)
	defer s.end(watch)
	w.Header().Set("Content-Type", contentOf(r.URL.Path)+";stream=watch")
	frames := protobuf.LengthDelimitedFramer.NewFrameWriter(w)
	send := func(event metav1.WatchEvent) {
		var encoded bytes.Buffer
		if kinds[r.URL.Path].isJSON {
			_ = json.NewEncoder(w).Encode(event)
			return
		}
		if err := protobuf.NewRawSerializer(s.scheme, s.scheme).Encode(&event, &encoded); err != nil {
			panic(err)
		}
		_, _ = frames.Write(encoded.Bytes())
	}
	for _, event := range first {
		send(event)
	}
	for {
		w.(http.Flusher).Flush()
		select {
		case event, open := <-watch.events:
			if !open {
				return
			}
			send(event)
		case <-r.Context().Done():
			return
		}
	}
}

// begin returns a watch, and its first events: all nodes, or what has changed since a version.
func (s *Server) begin(w *watch, version string, initial bool) (*watch, []metav1.WatchEvent) {
	const room = 20_000 // events that a slow client may not have read yet

	s.mu.Lock()
	defer s.mu.Unlock()
	w.events = make(chan metav1.WatchEvent, room)
	s.watches[w] = struct{}{}
	var first []metav1.WatchEvent
	if !initial {
		since, err := strconv.Atoi(version)
		if err == nil && since < s.expired {
			first = append(first, s.expiredEvent(w.path))
		}
		for _, change := range s.history {
			if err == nil && change.version > since {
				first = append(first, s.eventsFor(w, change)...)
			}
		}
		return w, first
	}
	for _, object := range s.objects[w.path] {
		first = append(first, s.eventsFor(w, change{path: w.path, now: object})...)
	}
	end := kinds[w.path].none()
	end.SetResourceVersion(fmt.Sprint(s.version))
	end.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	return w, append(first, s.event("BOOKMARK", end))
}

// eventsFor returns the event that a watch gets, or none. An object that its selector no longer matches is deleted for it.
func (s *Server) eventsFor(w *watch, c change) []metav1.WatchEvent {
	if w.path != c.path {
		return nil
	}
	was, is := c.before != nil && isSelected(w.fields, c.before), c.now != nil && isSelected(w.fields, c.now)
	switch {
	case was && is:
		return []metav1.WatchEvent{s.event("MODIFIED", c.now)}
	case is:
		return []metav1.WatchEvent{s.event("ADDED", c.now)}
	case was:
		return []metav1.WatchEvent{s.event("DELETED", c.before)}
	}
	return nil
}

func (s *Server) end(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.watches, w)
}

func (s *Server) encode(object runtime.Object, kind schema.GroupVersionKind) []byte {
	object.GetObjectKind().SetGroupVersionKind(kind)
	var encoded bytes.Buffer
	if err := protobuf.NewSerializer(s.scheme, s.scheme).Encode(object, &encoded); err != nil {
		panic(err)
	}
	return encoded.Bytes()
}

// contentOf returns how the objects of a path are encoded.
func contentOf(path string) string {
	if kinds[path].isJSON {
		return runtime.ContentTypeJSON
	}
	return runtime.ContentTypeProtobuf
}

func (s *Server) encodeFor(path string, object runtime.Object, kind schema.GroupVersionKind) []byte {
	if !kinds[path].isJSON {
		return s.encode(object, kind)
	}
	object.GetObjectKind().SetGroupVersionKind(kind)
	encoded, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	return encoded
}

func (s *Server) event(kind string, object Object) metav1.WatchEvent {
	path := pathOf(object)
	return metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: s.encodeFor(path, object.DeepCopyObject(), kinds[path].GroupVersionKind)}}
}

// send sends a change to the watches. It needs the lock.
func (s *Server) send(c change) {
	c.version = s.version
	s.history = append(s.history, c)
	for watch := range s.watches {
		for _, event := range s.eventsFor(watch, c) {
			watch.events <- event
		}
	}
}

// Put adds or changes nodes, and sends the changes to the watches.
func (s *Server) Put(nodes ...*corev1.Node) {
	for _, node := range nodes {
		s.Set(node)
	}
}

// Set adds or changes objects, and sends the changes to the watches. Objects must not change afterwards.
func (s *Server) Set(objects ...Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, object := range objects {
		s.version++
		object.SetResourceVersion(fmt.Sprint(s.version))
		all := s.objects[pathOf(object)]
		before := all[nameOf(object)]
		all[nameOf(object)] = object
		s.send(change{path: pathOf(object), before: before, now: object})
	}
}

func nameOf(object Object) string {
	return strings.TrimPrefix(object.GetNamespace()+"/"+object.GetName(), "/")
}

// Remove removes a node, and sends the changes to the watches.
func (s *Server) Remove(name string) { s.remove(nodeNamed(name), true) }

// RemoveSilently removes a node as if the watches had missed it.
func (s *Server) RemoveSilently(name string) { s.remove(nodeNamed(name), false) }

// Unset removes the object of that name, and sends the changes to the watches.
func (s *Server) Unset(object Object) { s.remove(object, true) }

func nodeNamed(name string) Object { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

func (s *Server) remove(named Object, isSent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	path := pathOf(named)
	object := s.objects[path][nameOf(named)].DeepCopyObject().(Object)
	object.SetResourceVersion(fmt.Sprint(s.version))
	delete(s.objects[path], nameOf(named))
	if isSent {
		s.send(change{path: path, before: object})
	}
}

// Watched returns the paths and selectors of the watches that are under way.
func (s *Server) Watched() (all []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for watch := range s.watches {
		all = append(all, strings.TrimSuffix(watch.path+"?"+watch.fields.String(), "?"))
	}
	slices.Sort(all)
	return all
}

// Watches returns how many watches are under way.
func (s *Server) Watches() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.watches)
}

// Expire ends all watches, as a server does that has compacted the changes that they need.
func (s *Server) Expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history, s.expired = nil, s.version
	for watch := range s.watches {
		watch.events <- s.expiredEvent(watch.path)
	}
	s.endAll()
}

func (s *Server) expiredEvent(path string) metav1.WatchEvent {
	status := s.encodeFor(path, &metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonExpired, Code: http.StatusGone}, corev1.SchemeGroupVersion.WithKind("Status"))
	return metav1.WatchEvent{Type: "ERROR", Object: runtime.RawExtension{Raw: status}}
}

// SetStreaming is whether it can stream lists, as servers since Kubernetes 1.32 do, unless they have just started.
func (s *Server) SetStreaming(streams bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streams = streams
}

// SetDown has the server fail at all requests, or no longer. Watches end.
func (s *Server) SetDown(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
	if down {
		s.endAll()
	}
}

func (s *Server) endAll() {
	for watch := range s.watches {
		close(watch.events)
		delete(s.watches, watch)
	}
}
