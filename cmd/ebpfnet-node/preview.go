package main

import (
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
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"

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
	const onlyRoot = 0o600

	path := nodestate.SocketOf(state)
	err := os.Remove(path) // of an agent that was killed
	if err == nil || errors.Is(err, os.ErrNotExist) {
		var listener net.Listener
		if listener, err = net.Listen("unix", path); err == nil {
			mux := http.NewServeMux()
			mux.Handle("POST "+nodestate.PreviewPath, p)
			return errors.Join(os.Chmod(path, onlyRoot), metrics.ServeHTTP(ctx, listener, mux))
		}
	}
	log.Warn(fmt.Sprintf("ebpfnetctl policy preview does not work: %v", err))
	<-ctx.Done()
	return nil
}

// ServeHTTP answers a nodestate.Preview.
func (p *previewer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	const most = 64 << 20 // bytes

	var asked nodestate.Preview
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, most)).Decode(&asked)
	var changed []*networkingv1.NetworkPolicy
	if err == nil && (asked.Objects != "" || len(asked.Deleted) == 0) {
		changed, err = readObjects(asked.Objects)
	}
	var cluster policies.Cluster
	if err == nil {
		cluster, err = p.cluster(r.Context())
	}
	var answer nodestate.Previewed
	if err == nil {
		answer, err = policies.Preview(p.node, cluster, asked.Deleted, changed, asked.Connections)
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

func readObjects(text string) (all []*networkingv1.NetworkPolicy, err error) {
	const peek = 4096 // bytes, which tell JSON from YAML

	for decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), peek); ; {
		object := &networkingv1.NetworkPolicy{}
		err := decoder.Decode(object)
		switch {
		case errors.Is(err, io.EOF) && len(all) > 0:
			return all, nil
		case errors.Is(err, io.EOF):
			return nil, errors.New("there is no NetworkPolicy")
		case err != nil:
			return nil, err
		case object.Kind == "" && object.Name == "": // an empty document
			continue
		case object.Kind != "NetworkPolicy" || object.APIVersion != networkingv1.SchemeGroupVersion.String():
			return nil, fmt.Errorf("got %s %s, want %s NetworkPolicy", object.APIVersion, object.Kind, networkingv1.SchemeGroupVersion)
		}
		if object.Namespace == "" {
			object.Namespace = "default"
		}
		all = append(all, object)
	}
}
