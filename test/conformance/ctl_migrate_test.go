package conformance

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// formerConflists are networks before migrate, by the plugin that makes the interface.
var formerConflists = map[string]string{
	"ptp": `{"cniVersion": "0.4.0", "name": "pods", "plugins": [
	{"type": "ptp", "ipMasq": true, "mtu": 1500,
		"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
			"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}},
	{"type": "portmap", "snat": true, "capabilities": {"portMappings": true}}]}`,
	"bridge": `{"cniVersion": "0.4.0", "name": "pods", "plugins": [
	{"type": "bridge", "isGateway": true, "ipMasq": true, "hairpinMode": true,
		"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
	{"type": "portmap", "snat": true, "capabilities": {"portMappings": true}}]}`,
}

// newFormer gives a script a network of another plugin, and returns the arguments of migrate.
func (s *script) newFormer(plugin string) (migrate []string) {
	s.Helper()
	for _, plugin := range []string{"main/" + plugin, "meta/portmap", "ipam/host-local"} {
		testenv.Build(s, "github.com/containernetworking/plugins/plugins/"+plugin)
	}
	dir := s.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "10-pods.conflist"), []byte(formerConflists[plugin]), 0o644); err != nil {
		s.Fatal(err)
	}
	s.setNetwork(formerConflists[plugin])
	return []string{"migrate", "--conf-dir", dir, "--bin-dir", filepath.Dir(s.host.plugin), "--cache-dir", s.runtime.CacheDir}
}

// TestCtlMigrateLosesNothing numbers datagrams, thousands per second, while a network is led over and back. Not one may be
// lost on any path from or to a container that is adopted.
func TestCtlMigrateLosesNothing(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	for plugin := range formerConflists {
		t.Run(plugin, func(t *testing.T) {
			s := newScript(t)
			migrate := s.newFormer(plugin)
			for range 2 { // with devices that no program has been on
				if err := testenv.WithoutBacklogDrops(t, func(int) error { return s.migrateBusy(migrate) }); err != nil {
					t.Error(err)
				}
			}
			if plugin == "bridge" {
				s.host.ip(t, "link del cni0")
			}
		})
	}
}

// migrateBusy leads two new containers over and back. An error names what is lost.
func (s *script) migrateBusy(migrate []string) (lost error) {
	s.Helper()
	web, client := s.runtime.AddPod(s, "web", map[string]any{"portMappings": streamPorts()}), s.runtime.AddPod(s, "client", nil)
	for _, args := range [][]string{migrate, append(migrate, "--back")} {
		streams := s.startStreams(web, client)
		start := time.Now()
		s.host.wantCtl(s.T, 0, args)
		lost = errors.Join(lost, lostOf(s.T, streams, start))
	}
	for _, pod := range []*testenv.Pod{web, client} {
		if err := pod.Del(testenv.Context(s)); err != nil {
			s.Fatal(err)
		}
	}
	return lost
}

// A host port of streamPorts is that of a container plus firstHostPort.
const firstHostPort = 8000

func streamPorts() (mappings []map[string]any) {
	for port := 80; port < 83; port++ {
		mappings = append(mappings, map[string]any{"hostPort": firstHostPort + port, "containerPort": port, "protocol": "udp"})
	}
	return mappings
}

// startStreams sends on each path of container web that may have NAT, and on those that have none.
func (s *script) startStreams(web, client *testenv.Pod) (streams []*testenv.Stream) {
	node, outside := s.host.Node, s.host.Outside
	for _, family := range testenv.Families {
		if !family.Pod(web).IsValid() {
			continue
		}
		toPort := func(from *testenv.Namespace, port uint16) {
			streams = append(streams, testenv.StartStream(s, from, web.Namespace, netip.AddrPortFrom(family.Pod(web), port),
				netip.AddrPortFrom(family.Node, firstHostPort+port), time.Millisecond))
		}
		direct := func(from, to *testenv.Namespace, addr netip.Addr) {
			at := netip.AddrPortFrom(addr, uint16(7000+len(streams)))
			streams = append(streams, testenv.StartStream(s, from, to, at, at, time.Millisecond))
		}
		toPort(outside, 80)
		toPort(node, 81)
		toPort(client.Namespace, 82)
		direct(web.Namespace, outside, family.Outside)
		direct(web.Namespace, node, family.Node)
		direct(node, web.Namespace, family.Pod(web))
		direct(client.Namespace, web.Namespace, family.Pod(web))
	}
	return streams
}

// lostOf stops the streams. An error names what they have lost.
func lostOf(t *testing.T, streams []*testenv.Stream, start time.Time) (err error) {
	t.Helper()
	took, all := time.Since(start), 0
	for _, stream := range streams {
		stream.Finish()
	}
	ctx := testenv.Context(t)
	for _, stream := range streams {
		sent, lost := stream.Stop(ctx)
		all += sent
		for _, datagram := range lost {
			err = errors.Join(err, fmt.Errorf("stream from %v: lost a datagram (a reply: %v) of %v after the start",
				stream, datagram.IsReply, datagram.Sent.Sub(start)))
		}
	}
	t.Logf("%d datagrams in %v", all, took)
	return err
}
