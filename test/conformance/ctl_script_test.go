package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestCtlScripts runs each script of testdata/ctl on a live network of its own, which the commands below make.
func TestCtlScripts(t *testing.T) {
	scripts, err := filepath.Glob("testdata/ctl/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("scripts: got none (%v)", err)
	}
	needs := map[string]testenv.Feature{
		"doctor-bridge": testenv.BridgeNetfilter, "doctor-legacy": testenv.LegacyTables, "doctor-nodes": testenv.VXLAN, "nodes": testenv.VXLAN, "repair": testenv.TCX, "trace-node": testenv.TunnelSource,
	}
	for _, script := range scripts {
		name := strings.TrimSuffix(filepath.Base(script), ".txt")
		t.Run(name, func(t *testing.T) {
			if feature, ok := needs[name]; ok {
				testenv.Require(t, feature)
			}
			s := newScript(t)
			testscript.Run(t, testscript.Params{Files: []string{script}, Setup: s.setup, Cmds: s.commands(), Condition: condition})
		})
	}
}

// script is a script with its network.
type script struct {
	*testing.T
	host    *host
	runtime *testenv.Runtime
	pods    map[string]*testenv.Pod
	clients []client
	served  map[string]bool // by protocol and address
	binary  string
}

// client is an open connection.
type client struct {
	*testenv.Client
	server netip.Addr
}

func newScript(t *testing.T) *script {
	s := &script{T: t, host: newHost(t), pods: map[string]*testenv.Pod{}, served: map[string]bool{}, binary: testenv.Build(t, "./cmd/ebpfnetctl")}
	s.setNetwork(scriptConflist)
	return s
}

// scriptConflist is the network of a script that names no other.
const scriptConflist = `{"cniVersion": "1.1.0", "name": "pods", "plugins": [{
	"type": "ebpfnet", "ipMasq": true, "fastPath": "established", "capabilities": {"portMappings": true, "aliases": true, "bandwidth": true},
	"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
		"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}]}`

func (s *script) setNetwork(conflist string) {
	s.runtime = testenv.NewRuntime(s, s.host.Node, []byte(conflist), filepath.Dir(s.host.plugin))
}

// condition knows [tcx], for what only kernels with it do.
func condition(name string) (bool, error) {
	if name != "tcx" {
		return false, fmt.Errorf("condition [%s]: expected [tcx]", name)
	}
	return testenv.TCX.Probe() == nil, nil
}

// setup gives a script the addresses of its network, and ebpfnetctl in its PATH.
func (s *script) setup(env *testscript.Env) error {
	env.Setenv("PATH", filepath.Dir(s.binary)+":"+env.Getenv("PATH"))
	env.Setenv("NODE", s.host.Node.Path)
	env.Setenv("PLUGIN", s.host.plugin)
	env.Setenv("BIN", filepath.Dir(s.host.plugin))
	for _, family := range testenv.Families {
		env.Setenv("OUTSIDE"+family.Name[3:], family.Outside.String())
		env.Setenv("NODE"+family.Name[3:], family.Node.String())
	}
	env.Setenv("CACHE", s.runtime.CacheDir)
	hooks, err := filepath.Abs("../../cmd/ebpfnetctl/hooks")
	env.Setenv("HOOKS", hooks)
	return err
}

func (s *script) commands() map[string]func(*testscript.TestScript, bool, []string) {
	return map[string]func(*testscript.TestScript, bool, []string){
		"ctl":     s.ctl,
		"schema":  s.schema,
		"columns": columns,
		"network": s.network,
		"others":  s.others,
		"relist":  s.relist,
		"add":     s.add,
		"check":   s.check,
		"del":     s.del,
		"vanish":  s.vanish,
		"connect": s.connect,
		"client":  s.client,
		"local":   s.local,
		"reach":   s.reach,
		"alive":   s.alive,
		"busy":    s.busy,
		"forge":   s.forge,
		"return":  s.sendBack,
		"link":    s.link,
		"sysctl":  s.sysctl,
		"node":    s.node,

		"remedies": s.remedies,
		"nothing":  s.nothing,
	}
}

// ctl CODE ARGUMENT... runs ebpfnetctl on the node, and wants an exit code.
func (s *script) ctl(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	exit, stdout, stderr := s.host.ctl(s.T, args[1:]...)
	fmt.Fprint(ts.Stdout(), stdout)
	fmt.Fprint(ts.Stderr(), stderr)
	if exit != want {
		ts.Fatalf("exit code %d, want %d", exit, want)
	}
	if exit == 2 && stdout != "" {
		ts.Fatalf("wrong arguments: got %q on stdout, want nothing", stdout)
	}
}

// schema COMMAND holds the JSON on stdout to the schema of a command.
func (s *script) schema(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(s.validate(args[0], ts.ReadFile("stdout")))
}

// columns N wants no longer line on stdout.
func columns(ts *testscript.TestScript, _ bool, args []string) {
	most, err := strconv.Atoi(args[0])
	ts.Check(err)
	for line := range strings.Lines(ts.ReadFile("stdout")) {
		if n := utf8.RuneCountInString(strings.TrimSpace(line)); n > most {
			ts.Fatalf("a line of %d columns, want at most %d: %s", n, most, line)
		}
	}
}

// network FILE replaces the network of containers that are added later.
func (s *script) network(ts *testscript.TestScript, _ bool, args []string) {
	s.setNetwork(ts.ReadFile(args[0]))
	ts.Setenv("CACHE", s.runtime.CacheDir)
}

// others FOLDER/PLUGIN... puts reference plugins beside ours.
func (s *script) others(_ *testscript.TestScript, _ bool, args []string) {
	for _, plugin := range args {
		testenv.Build(s, "github.com/containernetworking/plugins/plugins/"+plugin)
	}
}

// relist FILE has the runtime read the present network's list again. With -cached CONTAINER it takes, as podman does,
// what libcni's cache says.
func (s *script) relist(ts *testscript.TestScript, _ bool, args []string) {
	text := []byte(nil)
	if args[0] == "-cached" {
		var cached struct{ Config []byte }
		name := s.runtime.Network() + "-" + args[1] + "-" + testenv.PodIfName
		ts.Check(json.Unmarshal([]byte(ts.ReadFile(filepath.Join(s.runtime.CacheDir, "results", name))), &cached))
		text = cached.Config
	} else {
		text = []byte(ts.ReadFile(args[0]))
	}
	ts.Check(s.runtime.SetNetwork(text))
}

// add CONTAINER [FILE] [KEY=VALUE...] adds a container, with the capabilities' arguments in a file, and CNI_ARGS.
// CONTAINER4 and CONTAINER6 become its addresses, and CONTAINER_DEVICE the host's end of its veth.
func (s *script) add(ts *testscript.TestScript, _ bool, args []string) {
	var capabilities map[string]any
	var cniArgs [][2]string
	for _, arg := range args[1:] {
		if key, value, ok := strings.Cut(arg, "="); ok {
			cniArgs = append(cniArgs, [2]string{key, value})
			continue
		}
		ts.Check(json.Unmarshal([]byte(ts.ReadFile(arg)), &capabilities))
	}
	pod := s.runtime.AddPod(s, args[0], capabilities, cniArgs...)
	s.pods[args[0]] = pod
	ts.Setenv(args[0]+"4", pod.Addr4().String())
	ts.Setenv(args[0]+"6", pod.Addr6().String())
	ts.Setenv(args[0]+"_DEVICE", pod.Result.Interfaces[0].Name)
}

// check CONTAINER calls CHECK, and prints what it says. ! check wants it to fail.
func (s *script) check(ts *testscript.TestScript, fails bool, args []string) {
	err := s.pods[args[0]].Check(testenv.Context(s))
	call := s.runtime.LastCall(s)
	fmt.Fprintf(ts.Stdout(), "%s%s", call.Stdout, call.Stderr)
	if (err != nil) != fails {
		ts.Fatalf("check %s: %v", args[0], err)
	}
}

// del CONTAINER removes it, and its connections. ! del wants that to fail.
func (s *script) del(ts *testscript.TestScript, fails bool, args []string) {
	pod := s.pods[args[0]]
	addresses := []netip.Addr{pod.Addr4(), pod.Addr6()}
	err := pod.Del(testenv.Context(s))
	if !fails {
		ts.Check(err)
		isIts := func(c client) bool {
			return slices.Contains(addresses, c.Local().Addr()) || slices.Contains(addresses, c.server)
		}
		s.clients = slices.DeleteFunc(s.clients, isIts)
	} else if err == nil {
		ts.Fatalf("del %s: got no error", args[0])
	}
}

// vanish CONTAINER ends it without a DEL.
func (s *script) vanish(ts *testscript.TestScript, _ bool, args []string) {
	p := s.pods[args[0]]
	ts.Check(p.Close())
	testenv.Eventually(s, "the device to disappear with its namespace", func() error {
		links, err := rtnl.Links(s.host.Node.Netlink())
		for _, link := range links {
			if link.Attrs().Name == p.Result.Interfaces[0].Name {
				return fmt.Errorf("%s exists", link.Attrs().Name)
			}
		}
		return err
	})
}

// connect CONTAINER PROTOCOL FAMILY PORT opens a connection from a container to the host outside, which stays open.
func (s *script) connect(ts *testscript.TestScript, _ bool, args []string) {
	remote := netip.AddrPortFrom(familyOf(ts, args[2]).Outside, portOf(ts, args[3]))
	ts.Check(s.ask(s.host.Outside, s.pods[args[0]].Namespace, args[1], remote, remote))
}

// client PROTOCOL FAMILY HOSTPORT CONTAINER PORT opens one from the host outside to a host port.
func (s *script) client(ts *testscript.TestScript, _ bool, args []string) {
	family, pod := familyOf(ts, args[1]), s.pods[args[3]]
	ts.Check(s.ask(pod.Namespace, s.host.Outside, args[0], netip.AddrPortFrom(family.Node, portOf(ts, args[2])),
		netip.AddrPortFrom(family.Pod(pod), portOf(ts, args[4]))))
}

// local PROTOCOL ADDRESS HOSTPORT CONTAINER PORT opens one from the node to a host port.
func (s *script) local(ts *testscript.TestScript, _ bool, args []string) {
	addr, err := netip.ParseAddr(args[1])
	ts.Check(err)
	family, pod := testenv.IPv4, s.pods[args[3]]
	if addr.Is6() {
		family = testenv.IPv6
	}
	ts.Check(s.ask(pod.Namespace, s.host.Node, args[0], netip.AddrPortFrom(addr, portOf(ts, args[2])),
		netip.AddrPortFrom(family.Pod(pod), portOf(ts, args[4]))))
}

// reach CONTAINER PROTOCOL CONTAINER PORT [HOSTPORT] opens one from a container to another one over IPv4, by its own address
// or by a host port.
func (s *script) reach(ts *testscript.TestScript, _ bool, args []string) {
	to := s.pods[args[2]]
	server := netip.AddrPortFrom(to.Addr4(), portOf(ts, args[3]))
	remote := server
	if len(args) > 4 {
		remote = netip.AddrPortFrom(testenv.NodeAddr4, portOf(ts, args[4]))
	}
	ts.Check(s.ask(to.Namespace, s.pods[args[0]].Namespace, args[1], remote, server))
}

// alive wants each open connection to answer.
func (s *script) alive(ts *testscript.TestScript, _ bool, _ []string) {
	for _, client := range s.clients {
		for range 8 {
			if _, err := client.Ask(testenv.Context(s), "still there?"); err != nil {
				ts.Fatalf("connection of %v: %v", client.Local(), err)
			}
		}
	}
}

// busy ARGUMENT... runs ebpfnetctl migrate while all open connections ask without a pause, and wants each question to be
// answered, though none is repeated. Where that says nothing, it is led the other way, and done again.
func (s *script) busy(ts *testscript.TestScript, _ bool, args []string) {
	migrate := append([]string{"0", "migrate"}, args...)
	var all testenv.Askers
	for _, client := range s.clients {
		all = append(all, client.KeepAsking(s, fmt.Sprint("connection of ", client.Local()), 0))
	}
	ts.Check(all.Lossless(s, func(attempt int) error {
		if attempt > 0 {
			s.ctl(ts, false, otherWay(migrate))
		}
		s.ctl(ts, false, migrate)
		return nil
	}))
	all.Stop()
}

// otherWay returns the arguments of a migrate that undoes another one.
func otherWay(migrate []string) []string {
	if i := slices.Index(migrate, "--back"); i >= 0 {
		return slices.Delete(slices.Clone(migrate), i, i+1)
	}
	return append(slices.Clone(migrate), "--back")
}

// ask starts a server, and has a client ask until both directions are established, and bypass the stack.
func (s *script) ask(to, from *testenv.Namespace, protocol string, remote, server netip.AddrPort) error {
	serve := testenv.ServeTCP
	if protocol == "udp" {
		serve = testenv.ServeUDP
	}
	if name := protocol + server.String(); !s.served[name] {
		serve(s, to, server)
		s.served[name] = true
	}
	opened, err := testenv.NewClient(testenv.Context(s), from, protocol, netip.AddrPort{}, remote)
	if err != nil {
		return err
	}
	s.Cleanup(func() { opened.Close() })
	s.clients = append(s.clients, client{opened, server.Addr()})
	for range testenv.OffloadRequests {
		if _, err := opened.Ask(testenv.Context(s), "hello"); err != nil {
			return err
		}
	}
	return nil
}

// forge CONTAINER sends a frame that anti-spoofing drops.
func (s *script) forge(ts *testscript.TestScript, _ bool, args []string) {
	before := s.host.dropTotals(s.T)["mac"]
	ts.Check(s.pods[args[0]].SendFrames(testenv.PodIfName, make([]byte, 60)))
	s.host.awaitForged(s.T, before+1)
}

// return CONTAINER has a packet of a container come back from outside, as a router may send it.
func (s *script) sendBack(ts *testscript.TestScript, _ bool, args []string) {
	packet := testenv.UDPPacket(netip.AddrPortFrom(s.pods[args[0]].Addr4(), 5000), netip.AddrPortFrom(testenv.NodeAddr4, 80), "")
	packet.SrcMAC, packet.DstMAC = s.host.Outside.MACOf(s.T, testenv.UplinkName), s.host.Node.MACOf(s.T, testenv.UplinkName)
	ts.Check(s.host.Outside.SendFrames(testenv.UplinkName, packet.MustBuild()))
	testenv.Eventually(s.T, "the packet to be dropped", func() error {
		if s.host.dropTotals(s.T)["own-source"] == 0 {
			return errors.New("got no drop")
		}
		return nil
	})
}

// link up|down|del DEVICE changes a device of the node.
func (s *script) link(ts *testscript.TestScript, _ bool, args []string) {
	host := s.host.Node.Netlink()
	device, err := host.LinkByName(args[1])
	ts.Check(err)
	change, ok := map[string]func(netlink.Link) error{"up": host.LinkSetUp, "down": host.LinkSetDown, "del": host.LinkDel}[args[0]]
	if !ok {
		ts.Fatalf("link %s: expected up, down or del", args[0])
	}
	ts.Check(change(device))
}

// sysctl NAME VALUE sets a sysctl of the node.
func (s *script) sysctl(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(s.host.Node.SetSysctl(args[0], args[1]))
}

// node PREFIX ADDRESS ROUTE has a tunnel lead to another node's containers, as the agent of a cluster does. The route may
// lead to more.
func (s *script) node(ts *testscript.TestScript, _ bool, args []string) {
	const device, vni, port, mtu = "nodes", 7, 4789, 1450
	prefix, remote := netip.MustParsePrefix(args[0]), netip.MustParseAddr(args[1])
	s.host.ip(s.T, fmt.Sprintf("link add %s mtu %d type vxlan external dstport %d nolearning", device, mtu, port))
	link, err := s.host.Node.Netlink().LinkByName(device)
	ts.Check(err)
	s.host.withDatapath(s.T, func(datapath *loader.Datapath) error {
		ctx, tunnel := testenv.Context(s.T), maps.Tunnel{IfIndex: link.Attrs().Index, VNI: vni, Port: port}
		nodes := []maps.Node{{Prefix: prefix, Remote: remote, Mode: maps.NodeTunnel, MTU: mtu}}
		return errors.Join(refresh.Tunnel(ctx, datapath, tunnel),
			maps.With(ctx, datapath, func(store *maps.Store) error { return store.SetNodes(nodes) }))
	})
	s.host.ip(s.T, "link set "+device+" arp off addrgenmode none")
	s.host.ip(s.T, "link set "+device+" up")
	s.host.ip(s.T, fmt.Sprintf("route add %s dev %s encap ip id %d dst %s", args[2], device, vni, remote))
}

// remedies CHECK runs on the node the remedies that doctor's findings on stdout have for a check.
func (s *script) remedies(ts *testscript.TestScript, _ bool, args []string) {
	ran := 0
	for line := range strings.Lines(ts.ReadFile("stdout")) {
		_, remedy, found := strings.Cut(line, ". Do: ")
		if !found || !strings.HasPrefix(line, args[0]+" ") {
			continue
		}
		if _, err := s.host.Node.Run(testenv.Context(s), "sh", "-ec", remedy); err != nil {
			ts.Fatalf("%v", err)
		}
		ran++
	}
	if ran == 0 {
		ts.Fatalf("no remedy of %s", args[0])
	}
}

// nothing wants no container on the node, and none in libcni's cache.
func (s *script) nothing(ts *testscript.TestScript, _ bool, _ []string) {
	left, err := testenv.Leftovers(s.host.Node)
	ts.Check(err)
	cached, err := filepath.Glob(filepath.Join(ts.Getenv("CACHE"), "results", "*"))
	ts.Check(err)
	if len(left)+len(cached) > 0 {
		ts.Fatalf("left behind: %q, %q", left, cached)
	}
}

func familyOf(ts *testscript.TestScript, name string) testenv.Family {
	for _, family := range testenv.Families {
		if family.Name[2:] == name {
			return family
		}
	}
	ts.Fatalf("family %s: expected v4 or v6", name)
	return testenv.Family{}
}

func portOf(ts *testscript.TestScript, text string) uint16 {
	port, err := strconv.ParseUint(text, 10, 16)
	ts.Check(err)
	return uint16(port)
}
