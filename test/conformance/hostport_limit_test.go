package conformance

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// TestHostPortLimit opens the last host port of 65,536 of both families, and one more.
func TestHostPortLimit(t *testing.T) {
	const limit, perPort = 65536, 4 // entries: two directions, two families

	h := newHost(t)
	h.pod(t, "first", dual("1.0.0")).add(t) // loads the datapath
	last, beyond := h.pod(t, "last", withPort(dual("1.0.0"), 8080)), h.pod(t, "beyond", withPort(dual("1.0.0"), 8081))
	before := h.snapshot(t, beyond.Namespace)

	keys, values := make([]bpf.HostPortKey, perPort*(limit-1)), make([]bpf.HostPort, perPort*(limit-1))
	for i := range keys {
		keys[i] = bpf.HostPortKey{Port: uint16(i / perPort), Protocol: 6}
		keys[i].Addr.Bytes[0], keys[i].Addr.Bytes[1] = 0xfd, byte(i%perPort)
	}
	withDatapath(t, h, func(d *loader.Datapath) error {
		_, err := d.HostPorts.BatchUpdate(keys, values, nil)
		return err
	})
	wantFetch(t, h, last.Namespace, last.add(t))
	wantError(t, beyond.try(t, "ADD"), codeTryAgain, "8081", "all 262144 entries", "host_ports")
	withDatapath(t, h, func(d *loader.Datapath) error {
		_, err := d.HostPorts.BatchDelete(keys, nil)
		return err
	})
	last.del(t)
	h.wantUnchanged(t, before, beyond.Namespace)
}
