package conformance

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// object is a JSON object.
type object = map[string]any

// dual returns the plugin's configuration in network "pods", with addresses of both families.
func dual(version string) object {
	conf := single(version)
	conf["ipam"].(object)["ranges"] = list{list{object{"subnet": "10.88.0.0/16"}}, list{object{"subnet": "fd00:88::/64"}}}
	conf["ipam"].(object)["routes"] = list{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}}
	return conf
}

// single is dual with IPv4 only.
func single(version string) object {
	return object{
		"cniVersion": version,
		"name":       "pods",
		"type":       "ebpfnet",
		"ipMasq":     true,
		"ipam": object{
			"type":   "host-local",
			"ranges": list{list{object{"subnet": "10.88.0.0/16"}}},
			"routes": list{object{"dst": "0.0.0.0/0"}},
		},
	}
}

type list = []any

// absent as value of [with] removes the key.
var absent = new(int)

// with returns a copy of conf with another value at a path like "ipam.ranges".
func with(conf object, path string, value any) object {
	key, rest, nested := strings.Cut(path, ".")
	if !nested {
		return withKey(conf, key, value)
	}
	inner, _ := conf[key].(object)
	return withKey(conf, key, with(inner, rest, value))
}

// withKey is with for a key that may contain dots.
func withKey(conf object, key string, value any) object {
	changed := object{}
	maps.Copy(changed, conf)
	changed[key] = value
	if value == absent {
		delete(changed, key)
	}
	return changed
}

func encode(t *testing.T, value any) []byte {
	t.Helper()
	text, err := json.Marshal(value)
	testenv.Must(t, err)
	return text
}

// pod is a container, and what a runtime stores about it.
type pod struct {
	*testenv.Namespace
	host   *host
	id     string
	ifName string
	conf   object
	args   string // CNI_ARGS
	result object // of ADD, for CHECK
}

// pod makes a container that is not attached yet. The end of the test calls DEL with this configuration.
func (h *host) pod(t *testing.T, id string, conf object) *pod {
	t.Helper()
	p := &pod{Namespace: testenv.New(t, "pod-"+id), host: h, id: id, ifName: "eth0", conf: conf}
	original := *p
	t.Cleanup(func() {
		if call := original.try(t, "DEL"); call.Exit != 0 {
			t.Errorf("clean up: %v", call.Err())
		}
	})
	return p
}

// second returns an attachment of the same container with another interface.
func (p *pod) second(t *testing.T, ifName string) *pod {
	other := *p
	other.ifName, other.result = ifName, nil
	t.Cleanup(func() { other.try(t, "DEL") })
	return &other
}

// env returns the environment for a verb.
func (p *pod) env(verb string) map[string]string {
	env := map[string]string{
		"CNI_COMMAND":     verb,
		"CNI_CONTAINERID": p.id,
		"CNI_NETNS":       p.Path,
		"CNI_IFNAME":      p.ifName,
		"CNI_PATH":        p.host.path,
	}
	if p.args != "" {
		env["CNI_ARGS"] = p.args
	}
	return env
}

// stdin returns the configuration, with prevResult after an ADD.
func (p *pod) stdin(t *testing.T) []byte {
	t.Helper()
	conf := p.conf
	if p.result != nil {
		conf = with(conf, "prevResult", p.result)
	}
	return encode(t, conf)
}

// try calls a verb.
func (p *pod) try(t *testing.T, verb string) *testenv.Call {
	t.Helper()
	return p.host.call(t, p.env(verb), p.stdin(t))
}

// add calls ADD, and fails the test if that fails.
// add wants an ADD to succeed.
func (p *pod) add(t *testing.T) *types100.Result {
	t.Helper()
	if flows, ok := p.conf["maxFlows"].(int); (ok || p.conf["maxFlows"] == nil) && !p.host.loads {
		testenv.Preload(t, p.host.Node, loader.Options{MaxFlows: uint32(flows)})
	}
	p.result = nil
	call := p.try(t, "ADD")
	wantSuccess(t, call, anything)
	if err := json.Unmarshal(call.Stdout, &p.result); err != nil {
		t.Fatalf("result of ADD: %v, want one JSON document: %s", err, call.Stdout)
	}
	return parseResult(t, call.Stdout)
}

func parseResult(t *testing.T, stdout []byte) *types100.Result {
	t.Helper()
	raw, err := create.CreateFromBytes(stdout)
	if err != nil {
		t.Fatalf("parse result: %v: %s", err, stdout)
	}
	result, err := types100.GetResult(raw)
	if err != nil {
		t.Fatalf("convert result: %v: %s", err, stdout)
	}
	return result
}

func (p *pod) del(t *testing.T) {
	t.Helper()
	wantSuccess(t, p.try(t, "DEL"), "")
	p.result = nil
}

// device returns the container's interface.
func (p *pod) device(t *testing.T) netlink.Link {
	t.Helper()
	link, err := p.Netlink().LinkByName(p.ifName)
	if err != nil {
		t.Fatalf("find %s in the container: %v", p.ifName, err)
	}
	return link
}

// hostDevice returns the host's end of the veth.
func (p *pod) hostDevice(t *testing.T, result *types100.Result) netlink.Link {
	t.Helper()
	link, err := p.host.Node.Netlink().LinkByName(result.Interfaces[0].Name)
	if err != nil {
		t.Fatalf("find the host's end: %v", err)
	}
	return link
}

// addresses returns the addresses in a result, in its order.
func addresses(result *types100.Result) []netip.Addr {
	var addrs []netip.Addr
	for _, ip := range result.IPs {
		addr, _ := netip.AddrFromSlice(ip.Address.IP)
		addrs = append(addrs, addr.Unmap())
	}
	return addrs
}

func wantPing(t *testing.T, from *testenv.Namespace, to ...netip.Addr) {
	t.Helper()
	for _, addr := range to {
		if err := testenv.Ping(testenv.Context(t), from, addr); err != nil {
			t.Errorf("ping %s: %v", addr, err)
		}
	}
}

// vanish removes the container's namespace without a DEL, and waits until the kernel has removed its devices.
func (p *pod) vanish(t *testing.T) {
	t.Helper()
	alias := fmt.Sprintf("ebpfnet %s %s %s", p.conf["name"], p.id, p.ifName)
	testenv.Must(t, p.Close())
	testenv.Eventually(t, "the device to disappear with its namespace", func() error {
		links, err := rtnl.Links(p.host.Node.Netlink())
		for _, link := range links {
			if link.Attrs().Alias == alias {
				return fmt.Errorf("%s exists", link.Attrs().Name)
			}
		}
		return err
	})
}

// wantFetch fetches a page from host port 8080, in the families of the result, from the outside. The server must see the
// client's own address.
func wantFetch(t *testing.T, h *host, server *testenv.Namespace, result *types100.Result) {
	t.Helper()
	addrs := addresses(result)
	if len(addrs) == 0 {
		t.Error("fetch: the result has no address")
	}
	for _, addr := range addrs {
		f := testenv.IPv6
		if addr.Is4() {
			f = testenv.IPv4
		}
		testenv.ServeHTTP(t, server, netip.AddrPortFrom(addr, 80))
		url := "http://" + netip.AddrPortFrom(f.Node, 8080).String() + "/"
		seen, err := testenv.HTTPGet(testenv.Context(t), h.Outside, url)
		if err != nil {
			t.Errorf("get %s: %v", url, err)
		} else if !strings.Contains(seen, f.Outside.String()) {
			t.Errorf("server sees %s, want %s", seen, f.Outside)
		}
	}
}
