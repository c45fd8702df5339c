package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/binaries"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/conflist"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/health"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/nodes"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/objects"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/probe"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/metrics"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

func main() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1) // the agent waits most of the time, and each event would wake threads for nothing
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "ebpfnet-node:", show.Message(err.Error()))
		os.Exit(1)
	}
}

// run runs the agent until ctx is done. Routes, devices and files stay.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parseOptions(args)
	if err != nil {
		return err
	}
	log := show.NewLogger(stderr, slog.LevelInfo)
	klog.SetSlogLogger(log) // client-go's
	if o.command == commandUninstall {
		return o.uninstall(ctx, log, o.stay)
	}
	if o.binDir != "" {
		if err := o.install(); err != nil {
			return err
		}
	}
	api, err := o.api()
	if err != nil {
		return err
	}
	if o.lacksLimit() {
		log.Warn("any node can take any addresses, such as the API server's, and receive their packets: set --cluster-cidr")
	}
	watcher, err := nodes.New(api)
	if err != nil {
		return err
	}
	template, err := o.readTemplate()
	if err != nil {
		return err
	}
	maxFlows, err := conflist.MaxFlows(template)
	if err != nil {
		return err
	}
	dp := datapath{maxFlows: maxFlows}
	host, err := reconcile.Open(dp, o.Device)
	if err != nil {
		return err
	}
	defer host.Close()
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return err
	}
	events := &hostEvents{changed: make(chan struct{}, 1)}
	a := &agent{
		name: o.node, config: o.Config, nodes: watcher, host: host, events: events.changed,
		publish: o.publish, state: o.state, watching: events.follow, health: health.New(stuck), log: log,
	}
	enforce, err := o.enforcer(api, a, dp, events.wake)
	if err != nil {
		return err
	}
	parts := []func(context.Context) error{
		func(ctx context.Context) error { watcher.Run(ctx); return nil },
		events.watch,
		func(ctx context.Context) error { a.run(ctx); return nil },
		enforce,
		func(ctx context.Context) error { o.followDenied(ctx, stdout, log); return nil },
		func(ctx context.Context) error { return metrics.ServeHTTP(ctx, listener, o.handler(a)) },
	}
	if o.Mode == desired.ModeAuto {
		prober := probe.New(o.probePort, events.wake)
		a.prober = prober
		parts = append(parts, func(ctx context.Context) error { prober.Run(ctx); return nil })
	}
	return together(ctx, parts...)
}

// enforcer returns the function that enforces NetworkPolicy, or ends that.
func (o *options) enforcer(api *rest.Config, a *agent, dp datapath, wake func()) (func(context.Context) error, error) {
	host := &policyHost{datapath: dp}
	if !o.networkPolicy {
		return func(ctx context.Context) error { host.endPolicies(ctx, o.state, a.log); return nil }, nil
	}
	source, err := objects.New(api, o.node, nil)
	if err != nil {
		return nil, err
	}
	told, err := nodestate.ReadPolicies(o.state)
	if err != nil || told == nil { // pods of all namespaces wait for the first list
		told = &nodestate.Policies{Namespaces: []string{}, Written: time.Now().UTC()}
		if err := nodestate.WritePolicies(o.state, *told); err != nil {
			return nil, err
		}
	}
	a.enforcer = &enforcer{
		source: source, host: host, compiler: &policies.Compiler{Node: o.node}, state: o.state, grace: o.policyGrace,
		report: a.health.SetPolicy, wake: wake, log: a.log, namespaces: told.Namespaces,
		figures: newFigures(host),
	}
	a.reconnect = source.Reconnect
	return func(ctx context.Context) error {
		return together(ctx,
			func(ctx context.Context) error { source.Run(ctx); return nil },
			func(ctx context.Context) error { a.enforcer.run(ctx); return nil },
			func(ctx context.Context) error {
				return (&previewer{api: api, node: o.node}).serve(ctx, o.state, a.log)
			})
	}, nil
}

// together runs functions until one ends or ctx is done, and returns when all have ended.
func together(ctx context.Context, parts ...func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error)
	for _, part := range parts {
		go func() { ended <- part(ctx) }()
	}
	var errs []error
	for range parts {
		errs = append(errs, <-ended)
		stop()
	}
	return errors.Join(errs...)
}

// api returns the API server's configuration, and reserves its address: no node's prefix may have it.
func (o *options) api() (*rest.Config, error) {
	config, err := rest.InClusterConfig()
	if o.kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	if o.apiServer != "" {
		config.Host = o.apiServer
	}
	server, err := url.Parse(config.Host)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	if addr, err := netip.ParseAddr(server.Hostname()); err == nil {
		o.Reserved = append(o.Reserved, addr.Unmap())
	}
	config.UserAgent = "ebpfnet-node"
	return config, nil
}

// lacksLimit reports whether a node's prefix may have the API server's address. In a cluster the agent knows only the
// address of the server's service, not those behind it.
func (o *options) lacksLimit() bool {
	isServers := (o.kubeconfig != "" || o.apiServer != "") && len(o.Reserved) > 0
	return len(o.PodCIDRs) == 0 && !isServers
}

// install copies the plugins, which are in the agent's directory. It comes first, because DEL needs them, too.
func (o *options) install() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return binaries.Install(filepath.Dir(self), o.binDir)
}

// publish writes the conflist. It reads the template each time, because that may change.
func (o *options) publish(state *desired.State) error {
	template, err := o.readTemplate()
	if err != nil {
		return err
	}
	filled, err := conflist.Fill(template, conflist.Node{
		PodCIDRs: state.PodCIDRs, MTU: state.PodMTU, Tunnel: state.Device != nil, State: o.state,
	})
	if err != nil {
		return err
	}
	_, err = nodestate.Replace(o.conflist, filled)
	return err
}

func (o *options) readTemplate() ([]byte, error) {
	if o.template == "" {
		return conflist.Default, nil
	}
	return os.ReadFile(o.template)
}

// handler serves the metrics of the agent and the datapath. Where those of the datapath cannot be read, it logs why and serves
// the agent's alone.
func (o *options) handler(a *agent) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(a.health)
	if a.enforcer != nil {
		registry.MustRegister(a.enforcer.figures)
	}
	all := prometheus.Gatherers{registry, metrics.New(metrics.Options{Runtimes: runtimes.Options{ConfDir: filepath.Dir(o.conflist)}})}
	return a.health.Handler(metrics.Handler(all, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
	}))
}

// hostEvents reports changes of this host.
type hostEvents struct {
	changed chan struct{}
	filter  atomic.Pointer[reconcile.Filter]
}

func (e *hostEvents) watch(ctx context.Context) error {
	return rtnl.Watch(ctx, func(m rtnl.Message) bool {
		filter := e.filter.Load()
		return filter == nil || filter.IsRelevant(m) // nil: before the first sync
	}, e.wake)
}

func (e *hostEvents) wake() {
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

// follow sets which events matter.
func (e *hostEvents) follow(state *desired.State, have *reconcile.Present) {
	filter := &reconcile.Filter{PodCIDRs: state.PodCIDRs}
	if have.Device != nil {
		filter.Tunnel = have.Device.Index
	}
	e.filter.Store(filter)
}
