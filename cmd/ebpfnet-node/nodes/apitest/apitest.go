// Package apitest is an API server for tests that lists and watches nodes as a real one does, with Kubernetes' own
// types and encoding.
//
// No product code may import it.
package apitest

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
)

// Server is an API server with nodes. Its methods are for any goroutine.
type Server struct {
	scheme *runtime.Scheme

	mu       sync.Mutex
	streams  bool
	down     bool
	version  int
	history  []change // since the last call of Expire
	expired  int      // the version of that
	nodes    map[string]*corev1.Node
	watches  map[*watch]struct{}
	requests []string
	bad      []string
}

// watch is one under way. Its events end with a close.
type watch struct{ events chan metav1.WatchEvent }

// change is an event and the version that it made.
type change struct {
	version int
	event   metav1.WatchEvent
}

// New returns a server without nodes.
func New() *Server {
	s := &Server{streams: true, scheme: runtime.NewScheme(), version: 100, nodes: map[string]*corev1.Node{}, watches: map[*watch]struct{}{}}
	if err := corev1.AddToScheme(s.scheme); err != nil {
		panic(err)
	}
	return s
}

// ServeHTTP answers a list, or a watch until that ends.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	initial := query.Get("sendInitialEvents") == "true"
	switch down, streams := s.record(r); {
	case down:
		s.refuse(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
	case query.Get("watch") == "":
		s.list(w, query)
	case initial && !streams:
		s.refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	default:
		s.watch(w, r, initial)
	}
}

func (s *Server) record(r *http.Request) (down, streams bool) {
	const accepted, ofWatch = runtime.ContentTypeProtobuf, ";stream=watch"

	s.mu.Lock()
	defer s.mu.Unlock()
	query := r.URL.Query()
	s.requests = append(s.requests, fmt.Sprintf("%s %s watch=%s stream=%s", r.Method, r.URL.Path, query.Get("watch"), query.Get("sendInitialEvents")))
	if accept := r.Header.Get("Accept"); accept != accepted && accept != accepted+ofWatch {
		s.bad = append(s.bad, fmt.Sprintf("accepts %q, want protobuf alone", accept))
	}
	if r.Method != http.MethodGet || r.URL.Path != "/api/v1/nodes" {
		s.bad = append(s.bad, fmt.Sprintf("%s %s, want nodes to be read alone", r.Method, r.URL.Path))
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
	_, _ = w.Write(s.encode(&metav1.Status{Status: metav1.StatusFailure, Reason: reason, Code: int32(code)}, "Status"))
}

// list answers with a page. A list of any version comes from the cache, which has no pages.
func (s *Server) list(w http.ResponseWriter, query url.Values) {
	s.mu.Lock()
	list := &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(s.version)}}
	limit, err := strconv.Atoi(query.Get("limit"))
	if err != nil || query.Get("resourceVersion") == "0" {
		limit = len(s.nodes)
	}
	for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
		if name <= query.Get("continue") {
			continue
		}
		if len(list.Items) == limit {
			list.Continue = list.Items[limit-1].Name
			break
		}
		list.Items = append(list.Items, *s.nodes[name])
	}
	encoded := s.encode(list, "NodeList")
	s.mu.Unlock()
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	_, _ = w.Write(encoded)
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request, initial bool) {
	watch, first := s.begin(r.URL.Query().Get("resourceVersion"), initial)
	defer s.end(watch)
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	frames := protobuf.LengthDelimitedFramer.NewFrameWriter(w)
	send := func(event metav1.WatchEvent) {
		var encoded bytes.Buffer
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
func (s *Server) begin(version string, initial bool) (*watch, []metav1.WatchEvent) {
	const room = 20_000 // events that a slow client may not have read yet

	s.mu.Lock()
	defer s.mu.Unlock()
	w := &watch{make(chan metav1.WatchEvent, room)}
	s.watches[w] = struct{}{}
	var first []metav1.WatchEvent
	if !initial {
		since, err := strconv.Atoi(version)
		if err == nil && since < s.expired {
			first = append(first, s.expiredEvent())
		}
		for _, change := range s.history {
			if err == nil && change.version > since {
				first = append(first, change.event)
			}
		}
		return w, first
	}
	for _, node := range s.nodes {
		first = append(first, s.event("ADDED", node))
	}
	return w, append(first, s.event("BOOKMARK", &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		ResourceVersion: fmt.Sprint(s.version), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
	}}))
}

func (s *Server) end(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.watches, w)
}

func (s *Server) encode(object runtime.Object, kind string) []byte {
	object.GetObjectKind().SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind))
	var encoded bytes.Buffer
	if err := protobuf.NewSerializer(s.scheme, s.scheme).Encode(object, &encoded); err != nil {
		panic(err)
	}
	return encoded.Bytes()
}

func (s *Server) event(kind string, node *corev1.Node) metav1.WatchEvent {
	return metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: s.encode(node.DeepCopy(), "Node")}}
}

// send sends an event to the watches. It needs the lock.
func (s *Server) send(kind string, node *corev1.Node) {
	event := s.event(kind, node)
	s.history = append(s.history, change{s.version, event})
	for watch := range s.watches {
		watch.events <- event
	}
}

// Put adds or changes nodes, and sends the changes to the watches.
func (s *Server) Put(nodes ...*corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, node := range nodes {
		s.version++
		node.ResourceVersion = fmt.Sprint(s.version)
		kind := "ADDED"
		if s.nodes[node.Name] != nil {
			kind = "MODIFIED"
		}
		s.nodes[node.Name] = node
		s.send(kind, node)
	}
}

// Remove removes a node, and sends the changes to the watches.
func (s *Server) Remove(name string) { s.remove(name, true) }

// RemoveSilently removes a node as if the watches had missed it.
func (s *Server) RemoveSilently(name string) { s.remove(name, false) }

func (s *Server) remove(name string, isSent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	node := s.nodes[name]
	node.ResourceVersion = fmt.Sprint(s.version)
	delete(s.nodes, name)
	if isSent {
		s.send("DELETED", node)
	}
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
		watch.events <- s.expiredEvent()
	}
	s.endAll()
}

func (s *Server) expiredEvent() metav1.WatchEvent {
	status := s.encode(&metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonExpired, Code: http.StatusGone}, "Status")
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
