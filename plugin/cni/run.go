// Package cni is what our CNI plugins share: it runs the verb that the environment names, with a log
// and a deadline, and prints results and errors in the format of the specification.
package cni

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/show"
	release "github.com/ebpfnet/ebpfnet/plugin/version"
)

// Verbs are the verbs of a plugin (SPEC, section 2). Errors without a code get that of their cause.
type Verbs interface {
	Add(context.Context, *Call) error
	Del(context.Context, *Call) error
	Check(context.Context, *Call) error
	Status(context.Context, *Call) error
	GC(context.Context, *Call) error
}

// Call is one call of a verb.
type Call struct {
	*config.Call
	Log *slog.Logger
	// OwnNetns says that the container's namespace may be our own.
	OwnNetns bool
}

// QuietCall returns a call that logs nothing.
func QuietCall(args *skel.CmdArgs) (*Call, error) {
	call, err := config.NewCall(args)
	return &Call{Call: call, Log: slog.New(slog.DiscardHandler)}, err
}

// CallOf is QuietCall with the keys of our plugin in a network's list.
func CallOf(network, version string, keys map[string]any, args skel.CmdArgs) (*Call, error) {
	keys = maps.Clone(keys)
	keys["name"], keys["cniVersion"] = network, version
	var err error
	if args.StdinData, err = json.Marshal(keys); err != nil {
		return nil, err
	}
	return QuietCall(&args)
}

// lockTimeout bounds the wait for other calls. Each holds its locks for milliseconds, but a node
// that starts can have hundreds of calls at once, and the first one loads the datapath. Runtimes
// wait for two minutes and more.
const lockTimeout = time.Minute

// Run runs the verb that the environment names, and ends the process on errors. Without a verb, it
// prints the name of the plugin, its version and about.
func Run(verbs Verbs, name, about string) {
	// The library compares namespaces after a verb has run, which would fail a complete DEL. Our
	// verbs compare them before.
	override := os.Getenv("CNI_NETNS_OVERRIDE")
	os.Setenv("CNI_NETNS_OVERRIDE", "true")

	// Writing to the pipes of a dead runtime would end the process. With this, the write fails instead,
	// and ADD undoes its work. Plugins that we execute would inherit an ignored signal, but not a handled one.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)

	r := &runner{lockTimeout: lockTimeout, ownNetns: override == "1" || strings.EqualFold(override, "true")}
	if err := skel.PluginMainFuncsWithError(r.funcs(verbs), version.All, name+" "+release.String()+"\n\n"+about); err != nil {
		printError(cnierr.Shown(err), cmp.Or(r.cniVersion, version.Current()))
		os.Exit(1)
	}
}

// Funcs returns the verbs for the CNI library. Each waits for locks until lockTimeout is over.
func Funcs(verbs Verbs, lockTimeout time.Duration) skel.CNIFuncs {
	return (&runner{lockTimeout: lockTimeout}).funcs(verbs)
}

type runner struct {
	lockTimeout time.Duration
	ownNetns    bool   // CNI_NETNS_OVERRIDE
	cniVersion  string // of the last call's configuration; errors are printed in it. "": unknown
}

func (r *runner) funcs(verbs Verbs) skel.CNIFuncs {
	return skel.CNIFuncs{
		Add:    r.wrap("ADD", verbs.Add),
		Del:    r.wrap("DEL", verbs.Del),
		Check:  r.wrap("CHECK", verbs.Check),
		Status: r.wrap("STATUS", verbs.Status),
		GC:     r.wrap("GC", verbs.GC),
	}
}

// wrap decodes the call, bounds the verb's wait for locks by a deadline and by signals, codes its error and writes the log.
func (r *runner) wrap(name string, verb func(context.Context, *Call) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		call, err := config.NewCall(args)
		r.cniVersion = call.CNIVersion()
		log := openLog(call)
		defer log.close()
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM) // ADD undoes its work
		defer stop()
		ctx, cancel := context.WithTimeout(ctx, r.lockTimeout)
		defer cancel()

		begin := time.Now()
		if err == nil {
			err = verb(ctx, &Call{call, log.Logger, r.ownNetns})
		}
		err = cnierr.WithCode(err)
		if name == "ADD" {
			log.writeKeys(call)
		}
		log.writeCall(name, call, time.Since(begin), err)
		return err
	}
}

// printError prints an error (SPEC, section 5). The library's own function omits the version.
func printError(err *cnitypes.Error, cniVersion string) {
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "    ")
	_ = encoder.Encode(struct {
		CNIVersion string `json:"cniVersion"`
		*cnitypes.Error
	}{show.Short(cniVersion), err})
}
