package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestCtlTop measures two containers that talk past the stack, and one that is silent.
func TestCtlTop(t *testing.T) {
	s := newScript(t)
	server, client, silent := s.runtime.AddPod(t, "server", nil), s.runtime.AddPod(t, "client", nil), s.runtime.AddPod(t, "silent", nil)
	testenv.Must(t, silent.SetSysctl("net/ipv6/conf/eth0/disable_ipv6", "1")) // no router solicitations
	version, err := testenv.KernelVersion()
	testenv.Must(t, err)
	for _, family := range testenv.Families {
		t.Run(family.Name, func(t *testing.T) {
			addr := netip.AddrPortFrom(family.Pod(server), 7000)
			testenv.ServeTCP(t, server.Namespace, addr)
			talk, err := testenv.NewClient(testenv.Context(t), client.Namespace, "tcp", netip.AddrPort{}, addr)
			testenv.Must(t, err)
			ctx, stop := context.WithCancel(testenv.Context(t))
			done := make(chan error)
			go func() {
				for ctx.Err() == nil {
					if _, err := talk.Ask(ctx, "hello"); err != nil && ctx.Err() == nil {
						done <- err
						return
					}
				}
				done <- nil
			}()
			// Both are seen once the connection bypasses the stack: "in" is counted at the container's end alone.
			testenv.Eventually(t, "traffic in both directions", func() error {
				_, stdout, stderr := s.host.ctl(t, "top", "--interval", "100ms", "-o", "json")
				var list []admin.Traffic
				if err := json.Unmarshal([]byte(stdout), &list); err != nil {
					return err
				}
				byID := map[string]admin.Traffic{}
				for _, traffic := range list {
					byID[traffic.ContainerID] = traffic
				}
				a, b, c := byID["server"], byID["client"], byID["silent"]
				if len(list) != 3 || list[2] != c || c.OutPackets != 0 || min(a.OutPackets, b.OutPackets) == 0 || min(a.OutBytes, b.OutBytes) < 100 {
					return errors.New(stdout + stderr)
				}
				if !version.Less(testenv.Version{Major: 6, Minor: 8}) && min(a.InPackets, b.InPackets) < 0.5*max(a.OutPackets, b.OutPackets) {
					return errors.New(stdout + stderr)
				}
				return nil
			})
			stop()
			testenv.NoError(t, errors.Join(<-done, talk.Close()))
		})
	}
}
