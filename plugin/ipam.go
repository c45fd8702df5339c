package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// IPAM is package ipam as a plugin of its own, for other plugins to call in the
// place of host-local (SPEC, section 4): the same keys, the same files, and besides
// them GC, STATUS, and writes that a crash cannot tear.
type IPAM struct {
	Stdout io.Writer
	Log    *slog.Logger

	cniVersion string
}

// NewIPAM returns the plugin as another plugin calls it.
func NewIPAM() *IPAM { return &IPAM{Stdout: os.Stdout} }

// Funcs returns the verbs for the CNI library.
func (p *IPAM) Funcs() skel.CNIFuncs {
	return verbs(&p.cniVersion, &p.Log, lockTimeout, p.Add, p.Del, p.Check, p.Status, p.GC)
}

// CNIVersion is that of Plugin.
func (p *IPAM) CNIVersion() string { return p.cniVersion }

// addressConf is what of a configuration concerns addresses.
type addressConf struct {
	Name string          `json:"name"`
	IPAM json.RawMessage `json:"ipam"`
	Args struct {
		CNI struct {
			IPs []string `json:"ips"`
		} `json:"cni"`
	} `json:"args"`
	RuntimeConfig struct {
		IPRanges json.RawMessage `json:"ipRanges"`
		IPs      []string        `json:"ips"`
	} `json:"runtimeConfig"`
}

// addresses takes the first request for addresses, in the order of CONVENTIONS.md.
func (c *addressConf) addresses(env cniArgs) (*ipam.Config, error) {
	static, err := ipam.Parse(c.Name, c.IPAM, ipam.Request{Ranges: c.RuntimeConfig.IPRanges})
	if err != nil {
		return nil, cniError(err)
	}
	for _, asked := range []struct {
		key     string
		value   []string
		invalid func(key string, value any, expected string) error
	}{
		{"runtimeConfig.ips", c.RuntimeConfig.IPs, invalid},
		{"args.cni.ips", c.Args.CNI.IPs, invalid},
		{"CNI_ARGS IP", split(string(env.IP)), invalidEnv},
	} {
		if len(asked.value) == 0 {
			continue
		}
		config, err := ipam.Parse(c.Name, c.IPAM, ipam.Request{Ranges: c.RuntimeConfig.IPRanges, IPs: asked.value})
		if err != nil {
			return nil, asked.invalid(asked.key, asked.value, fmt.Sprintf("addresses that the network can give (%v)", err))
		}
		return config, nil
	}
	return static, nil
}

func split(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

// parse reads what of a configuration concerns addresses. The rest is that of the plugin
// that calls.
func (p *IPAM) parse(args *skel.CmdArgs) (*ipam.Config, error) {
	var conf addressConf
	if err := decodeInto(args.StdinData, &conf); err != nil {
		return nil, err
	}
	if !asksForAddresses(conf.IPAM) {
		return nil, invalid("ipam", "", `an object, like {"type": "ebpfnet-ipam", "ranges": [[{"subnet": "10.88.0.0/24"}]]}`)
	}
	var env cniArgs
	if err := cnitypes.LoadArgs(args.Args, &env); err != nil {
		return nil, invalidEnv("CNI_ARGS", args.Args, fmt.Sprintf("known keys, or IgnoreUnknown=1 (%v)", err))
	}
	return conf.addresses(env)
}

// parseForRelease reads what DEL and GC need, as that of Plugin.
func (p *IPAM) parseForRelease(args *skel.CmdArgs) (*ipam.Config, error) {
	var conf struct {
		Name string          `json:"name"`
		IPAM json.RawMessage `json:"ipam"`
	}
	if err := decodeInto(args.StdinData, &conf); err != nil {
		return nil, err
	}
	return reservationsOf(conf.Name, conf.IPAM), nil
}

// pool opens the addresses of a network. Devices are the business of the plugin that calls.
func (p *IPAM) pool(c *ipam.Config) *ipam.Pool {
	return ipam.Open(c, ipam.Options{IndexDir: indexDir(record.DefaultDir), Log: p.Log})
}

// indexDir is where the indexes of reservations are, among the records of attachments.
func indexDir(dataDir string) string { return filepath.Join(dataDir, "addresses") }

// Add reserves addresses, and prints them.
func (p *IPAM) Add(ctx context.Context, args *skel.CmdArgs) error {
	config, err := p.parse(args)
	if err != nil {
		return err
	}
	pool, attachment := p.pool(config), attachmentFor(args)
	reserved, err := pool.Reserve(ctx, attachment)
	if err != nil {
		return err
	}
	r := &result{CNIVersion: types100.ImplementedSpecVersion, Routes: reserved.Routes, DNS: reserved.DNS}
	for _, address := range reserved.Addresses {
		prefix := address.Prefix
		r.IPs = append(r.IPs, &types100.IPConfig{
			Address: net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())},
			Gateway: address.Gateway.AsSlice(),
		})
	}
	if err := r.print(p.Stdout, p.cniVersion); err != nil {
		return withDetails(cniError(err), pool.Release(context.WithoutCancel(ctx), attachment))
	}
	return nil
}

func attachmentFor(args *skel.CmdArgs) ipam.Attachment {
	return ipam.Attachment{ContainerID: args.ContainerID, IfName: args.IfName}
}

// Del frees what Add reserved.
func (p *IPAM) Del(ctx context.Context, args *skel.CmdArgs) error {
	config, err := p.parseForRelease(args)
	if err != nil {
		return err
	}
	return p.pool(config).Release(ctx, attachmentFor(args))
}

// Check wants what is reserved to be in prevResult, and something to be reserved.
func (p *IPAM) Check(ctx context.Context, args *skel.CmdArgs) error {
	config, err := p.parse(args)
	if err != nil {
		return err
	}
	var conf netConf
	if err := json.Unmarshal(args.StdinData, &struct {
		PrevResult *map[string]any `json:"prevResult"`
	}{&conf.RawPrevResult}); err != nil {
		return invalid("prevResult", conf.RawPrevResult, "an object")
	}
	conf.CNIVersion = p.cniVersion
	prev, err := conf.prevResult()
	if err != nil {
		return err
	}
	reserved, err := p.pool(config).Reserved(ctx, attachmentFor(args))
	if err != nil {
		return err
	}
	if len(reserved) == 0 {
		return cnitypes.NewError(CodeDiffers, "no address is reserved for the container in "+config.Dir(), "DEL and ADD the container to mend it")
	}
	for _, addr := range reserved {
		has := func(ip *types100.IPConfig) bool { return prefixOf(ip.Address).Addr() == addr }
		if prev != nil && !slices.ContainsFunc(prev.IPs, has) {
			return cnitypes.NewError(CodeDiffers, addr.String()+" is reserved for the container, and not in prevResult", "DEL and ADD the container to mend it")
		}
	}
	return nil
}

// Status says whether there is an address left.
func (p *IPAM) Status(ctx context.Context, args *skel.CmdArgs) error {
	config, err := p.parse(args)
	if err != nil {
		return err
	}
	if err := p.pool(config).Available(ctx); err != nil {
		return notAvailable(err)
	}
	return nil
}

// GC frees what no attachment that is listed has. Without a list nothing can be said to be dead.
func (p *IPAM) GC(ctx context.Context, args *skel.CmdArgs) error {
	config, err := p.parseForRelease(args)
	if err != nil {
		return err
	}
	valid, err := validAttachments(args.StdinData, config.Network, nil)
	if err != nil || valid == nil {
		return err
	}
	_, err = p.pool(config).Retain(ctx, valid.has)
	return err
}
