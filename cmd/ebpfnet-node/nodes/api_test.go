package nodes

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
)

// apiServer answers as a real one does, with Kubernetes' own types and encoding.
type apiServer struct {
	*httptest.Server
	t         *testing.T
	scheme    *runtime.Scheme
	streaming bool // whether it can stream lists

	mu       sync.Mutex
	version  int
	nodes    map[string]*corev1.Node
	events   chan metav1.WatchEvent // of the watch under way
	requests []string
}

func newAPIServer(t *testing.T, streaming bool) *apiServer {
	t.Helper()
	s := &apiServer{t: t, scheme: runtime.NewScheme(), streaming: streaming, version: 100, nodes: map[string]*corev1.Node{}}
	if err := corev1.AddToScheme(s.scheme); err != nil {
		t.Fatal(err)
	}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	if r.Header.Get("Accept") != runtime.ContentTypeProtobuf && r.Header.Get("Accept") != runtime.ContentTypeProtobuf+";stream=watch" {
		s.t.Errorf("got a request that accepts %q, want protobuf alone", r.Header.Get("Accept"))
	}
	s.mu.Lock()
	s.requests = append(s.requests, fmt.Sprintf("%s %s watch=%s stream=%s", r.Method, r.URL.Path, query.Get("watch"), query.Get("sendInitialEvents")))
	s.mu.Unlock()
	switch {
	case query.Get("watch") == "":
		s.list(w)
	case query.Get("sendInitialEvents") == "true" && !s.streaming:
		s.refuse(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	default:
		s.watch(w, r, query.Get("sendInitialEvents") == "true")
	}
}

func (s *apiServer) refuse(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	w.WriteHeader(code)
	_, _ = w.Write(s.encode(&metav1.Status{Status: metav1.StatusFailure, Reason: reason, Code: int32(code)}, "Status"))
}

func (s *apiServer) list(w http.ResponseWriter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(s.version)}}
	for _, node := range s.nodes {
		list.Items = append(list.Items, *node)
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	_, _ = w.Write(s.encode(list, "NodeList"))
}

func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, initial bool) {
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	frames := protobuf.LengthDelimitedFramer.NewFrameWriter(w)
	send := func(event metav1.WatchEvent) {
		var encoded bytes.Buffer
		if err := protobuf.NewRawSerializer(s.scheme, s.scheme).Encode(&event, &encoded); err != nil {
			s.t.Error(err)
		}
		_, _ = frames.Write(encoded.Bytes())
		w.(http.Flusher).Flush()
	}
	s.mu.Lock()
	events := make(chan metav1.WatchEvent, 10)
	if initial {
		for _, node := range s.nodes {
			send(s.event("ADDED", node))
		}
		send(s.event("BOOKMARK", &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: fmt.Sprint(s.version), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}}))
	}
	s.events = events
	s.mu.Unlock()
	w.(http.Flusher).Flush()
	for {
		select {
		case event, open := <-events:
			if !open {
				return
			}
			send(event)
		case <-r.Context().Done():
			return
		}
	}
}

func (s *apiServer) encode(object runtime.Object, kind string) []byte {
	object.GetObjectKind().SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind))
	var encoded bytes.Buffer
	if err := protobuf.NewSerializer(s.scheme, s.scheme).Encode(object, &encoded); err != nil {
		s.t.Error(err)
	}
	return encoded.Bytes()
}

func (s *apiServer) event(kind string, node *corev1.Node) metav1.WatchEvent {
	return metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: s.encode(node.DeepCopy(), "Node")}}
}

// put adds or changes nodes, and tells the watch under way.
func (s *apiServer) put(nodes ...*corev1.Node) {
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
		if s.events != nil {
			s.events <- s.event(kind, node)
		}
	}
}

// remove removes a node. Where tell is false, the watch misses it.
func (s *apiServer) remove(name string, tell bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	node := s.nodes[name]
	node.ResourceVersion = fmt.Sprint(s.version)
	delete(s.nodes, name)
	if tell {
		s.events <- s.event("DELETED", node)
	}
}

// expire ends the watch, as a server does that has compacted what it would have to tell.
func (s *apiServer) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.encode(&metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonExpired, Code: http.StatusGone}, "Status")
	s.events <- metav1.WatchEvent{Type: "ERROR", Object: runtime.RawExtension{Raw: status}}
	close(s.events)
	s.events = nil
}

// watched returns a watcher that runs until the test ends.
func (s *apiServer) watched() *Watcher {
	s.t.Helper()
	w, err := New(&rest.Config{Host: s.URL})
	if err != nil {
		s.t.Fatal(err)
	}
	w.backoff = &wait.Backoff{Duration: time.Millisecond}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.Run(ctx)
	}()
	s.t.Cleanup(func() {
		stop()
		<-ended
	})
	return w
}
