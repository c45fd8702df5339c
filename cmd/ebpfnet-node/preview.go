package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/objects"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/plugin/metrics"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// previewer answers `ebpfnetctl policy preview`. It lists all pods, and forgets them.
type previewer struct {
	api  *rest.Config
	node string
}

// serve answers root on the socket beside the agent's state until ctx is done.
func (p *previewer) serve(ctx context.Context, state string, log *slog.Logger) error {
	listener, err := listenForRoot(nodestate.SocketOf(state))
	if err != nil {
		log.Warn(fmt.Sprintf("ebpfnetctl policy preview does not work: %v", err))
		<-ctx.Done()
		return nil
	}
	mux := http.NewServeMux()
	mux.Handle("POST "+nodestate.PreviewPath, p)
	return metrics.ServeHTTP(ctx, listener, mux)
}

// listenForRoot listens on a socket that only root can open.
func listenForRoot(path string) (net.Listener, error) {
	const onlyRoot = 0o600

	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) { // of an agent that was killed
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, onlyRoot); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

// ServeHTTP answers a nodestate.Preview.
func (p *previewer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const most = 64 << 20 // bytes

	var asked nodestate.Preview
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, most)).Decode(&asked)
	var change policies.Change
	if err == nil && (asked.Objects != "" || len(asked.Deleted) == 0) {
		change, err = readObjects(asked.Objects)
	}
	change.Deleted = asked.Deleted
	var cluster policies.Cluster
	if err == nil {
		cluster, err = p.cluster(r.Context())
	}
	var answer nodestate.Previewed
	if err == nil {
		answer, err = policies.Preview(p.node, cluster, change, asked.Connections)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer) // or the client is gone
}

// cluster lists all that policies need.
func (p *previewer) cluster(ctx context.Context) (cluster policies.Cluster, err error) {
	const patience = 20 * time.Second

	source, err := objects.New(p.api, p.node, nil)
	if err != nil {
		return cluster, err
	}
	source.NeedsNodes = true // new policies may name them
	ctx, stop := context.WithTimeout(ctx, patience)
	ended := make(chan struct{})
	go func() { defer close(ended); source.Run(ctx) }()
	defer func() { stop(); <-ended }()
	for {
		source.Need(ctx, true, true)
		cluster, isComplete, hasPeers := source.Cluster()
		if isComplete && hasPeers {
			return cluster, nil
		}
		select {
		case <-ctx.Done():
			return cluster, errors.Join(errPending, source.Err())
		case <-source.Changed():
		}
	}
}

func readObjects(text string) (change policies.Change, err error) {
	const peek = 4096 // bytes, which tell JSON from YAML

	for decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), peek); err == nil; {
		var document runtime.RawExtension
		switch err = decoder.Decode(&document); {
		case errors.Is(err, io.EOF) && len(change.Policies)+len(change.ClusterPolicies) > 0:
			return change, nil
		case errors.Is(err, io.EOF):
			return change, errors.New("there is no policy")
		case err == nil && len(document.Raw) > 0:
			err = addObject(&change, document.Raw)
		}
	}
	return change, err
}

// addObject adds a policy in JSON. An empty document is none.
func addObject(change *policies.Change, text []byte) (err error) {
	var object metav1.PartialObjectMetadata
	if err = json.Unmarshal(text, &object); err != nil || object.Kind == "" && object.Name == "" {
		return err
	}
	switch object.APIVersion + " " + object.Kind {
	case networkingv1.SchemeGroupVersion.String() + " NetworkPolicy":
		policy := &networkingv1.NetworkPolicy{}
		err = json.Unmarshal(text, policy)
		policy.Namespace = cmp.Or(policy.Namespace, "default")
		change.Policies = append(change.Policies, policy)
	case api.GroupVersion.String() + " ClusterNetworkPolicy":
		policy := &api.ClusterNetworkPolicy{}
		err = json.Unmarshal(text, policy)
		policy.Namespace = ""
		change.ClusterPolicies = append(change.ClusterPolicies, policy)
	default:
		err = fmt.Errorf("got %s %s, want %s NetworkPolicy or %s ClusterNetworkPolicy", object.APIVersion, object.Kind, networkingv1.SchemeGroupVersion, api.GroupVersion)
	}
	return err
}
