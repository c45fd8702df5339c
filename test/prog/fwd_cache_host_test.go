package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The tests of the forwarding cache send connections through the programs on a chosen CPU, and see the
// tags that the programs give to the stack.

// twoCPUs is that packets of a connection may be on different CPUs.
var twoCPUs = testenv.Feature{Name: "two CPUs", Probe: func() error {
	cpus, err := testenv.UsableCPUs()
	if err == nil && len(cpus) < 2 {
		err = fmt.Errorf("CPUs: got %v, want at least 2", cpus)
	}
	return err
}}

// on runs fn in the namespace, on the first or second of the usable CPUs.
func (h *host) on(number int, fn func() error) error {
	return h.Do(func() error { // its thread ends with it
		if err := testenv.PinThread(number); err != nil {
			return err
		}
		return fn()
	})
}

// skBuff is the head of struct __sk_buff. The kernel accepts only some fields from a test, and wants the others
// to be 0.
type skBuff struct {
	_       [9]uint32
	Ingress uint32
	Ifindex uint32
	_       uint32
	CB      [5]uint32
}

// tagReader runs from_container, and reads the tag that the packet has afterwards. The kernel does not
// return tc_index to a test: a caller of the program's function copies it to cb.
type tagReader struct {
	*ebpf.Collection
	ingress bool // the kernel has ingressDevice
}

func newTagReader(t *testing.T, h *host) tagReader {
	t.Helper()
	spec, err := specOfSize(h.programs.Maps[bpf.MapFlowBuckets].MaxEntries())
	testenv.Must(t, err)
	program := spec.Programs[bpf.ProgFromContainer]
	call := asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoCall, Constant: -1}
	const tcIndex, cb = 44, 48 // in struct __sk_buff
	caller := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, cb, asm.Word),
		asm.StoreMem(asm.R6, tcIndex, asm.R2, asm.Word),
		call.WithReference(bpf.ProgFromContainer),
		asm.LoadMem(asm.R1, asm.R6, tcIndex, asm.Word),
		asm.StoreMem(asm.R6, cb, asm.R1, asm.Word),
		asm.Return(),
	}
	called := *btf.FuncMetadata(&program.Instructions[0])
	called.Name = "tag_reader"
	caller[0] = btf.WithFuncMetadata(caller[0].WithSymbol(called.Name).WithSource(program.Instructions[0].Source()), &called)
	program.Instructions = append(caller, program.Instructions...)
	spec.Programs = map[string]*ebpf.ProgramSpec{bpf.ProgFromContainer: program}
	programs, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: h.programs.Maps})
	if err != nil {
		t.Fatalf("load the reader of tags: %+v", err)
	}
	t.Cleanup(programs.Close)
	return tagReader{programs, probeIngressDevice() == nil}
}

// run runs from_container on a frame from the device.
func (r tagReader) run(device *netlink.LinkAttrs, frame []byte) (got outcome, err error) {
	return r.runTagged(device, 0, frame)
}

// runTagged is run for a frame with a tag.
func (r tagReader) runTagged(device *netlink.LinkAttrs, tag uint32, frame []byte) (got outcome, err error) {
	var after struct {
		skBuff
		_ [64]uint32 // the rest
	}
	options := ebpf.RunOptions{
		Data: frame, DataOut: make([]byte, len(frame)), ContextOut: &after,
		Context: skBuff{Ifindex: uint32(device.Index), CB: [5]uint32{tag}},
	}
	if r.ingress {
		options.Context = skBuff{Ingress: uint32(device.Index), Ifindex: uint32(device.Index), CB: [5]uint32{tag}}
	}
	got.verdict, err = r.Programs[bpf.ProgFromContainer].Run(&options)
	got.tag, got.frame = after.CB[0], options.DataOut
	return got, err
}

// outcome is what a program has done with a frame.
type outcome struct {
	verdict, tag uint32
	frame        []byte
}

func (o outcome) observed() bool { return o.verdict == verdictNext && o.tag&tagObserve != 0 }

// cacheHost is a host with two pods, each behind a veth of its own that antiSpoof checks.
type cacheHost struct {
	*host
	tags    tagReader
	devices map[string]*netlink.LinkAttrs // by pod
}

var podMACs = map[string]testenv.MAC{"pod": {2, 0xbb, 0, 0, 0, 1}, "pod2": {2, 0xbb, 0, 0, 0, 3}}

func newCacheHost(t *testing.T) *cacheHost { return withCacheHost(t, newHost(t)) }

func withCacheHost(t *testing.T, h *host) *cacheHost {
	t.Helper()
	second, err := h.addVeth("veth2")
	testenv.Must(t, err)
	return &cacheHost{host: h, tags: newTagReader(t, h), devices: map[string]*netlink.LinkAttrs{"pod": h.veth, "pod2": second}}
}

// start makes the host's pods, which nothing is known of.
func (h *cacheHost) start(s scene, path bpf.FastPath) error {
	errs := []error{h.reset(), h.emptyForwardingCache(), h.forget()}
	for pod := range podMACs {
		errs = append(errs, h.putPod(s, pod, path, nil), h.putPodDevice(s, pod, nil))
	}
	return errors.Join(errs...)
}

// forget removes the entries of the forwarding cache, which count the packets of former connections, too, and the
// notes about tuples.
func (h *host) forget() error {
	notes := h.programs.Maps[bpf.MapTupleNotes]
	places := make([]uint32, notes.MaxEntries())
	for i := range places {
		places[i] = uint32(i)
	}
	if _, err := notes.BatchUpdate(places, make([]uint64, len(places)), nil); err != nil {
		return err
	}
	ways := h.programs.Maps[bpf.MapFwdWays]
	none := make([]bpf.FwdWays, ebpf.MustPossibleCPU())
	for bucket := range ways.MaxEntries() {
		if err := ways.Put(bucket, none); err != nil {
			return err
		}
	}
	return nil
}

func (h *cacheHost) putPod(s scene, pod string, path bpf.FastPath, edit func(*bpf.Endpoint)) error {
	endpoint := bpf.Endpoint{
		Owner: owners[pod], Network: 1, Container: owners[pod], Ifindex: uint32(h.devices[pod].Index), Gateway: s.wire("podgw"),
		Flags: bpf.EndpointMasq, Mac: podMACs[pod], HostMac: testenv.MAC(h.devices[pod].HardwareAddr), Mtu: podMTU, FastPath: path,
	}
	if edit != nil {
		edit(&endpoint)
	}
	return h.programs.Maps[bpf.MapEndpoints].Put(s.wire(pod), endpoint)
}

func (h *cacheHost) putPodDevice(s scene, pod string, edit func(*bpf.Device)) error {
	device := bpf.Device{
		Owner: owners[pod], Network: 1, Container: owners[pod], Flags: antiSpoof, Mac: podMACs[pod],
		Addr4: v4.wire(pod), Addr6: v6.wire(pod), Gateway4: v4.wire("podgw"), Gateway6: v6.wire("podgw"),
	}
	if edit != nil {
		edit(&device)
	}
	return h.programs.Maps[bpf.MapDevices].Put(uint32(h.devices[pod].Index), device)
}

// packet is a packet of the pod's, in the middle of a TCP connection.
func (h *cacheHost) packet(s scene, pod, text string) testenv.Packet {
	p := s.packet(text, false)
	p.SrcMAC, p.DstMAC = podMACs[pod], testenv.MAC(h.devices[pod].HardwareAddr)
	if s.proto == tcp {
		p.TCPFlags, p.Seq, p.Ack = testenv.ACK, podSYN+1, podACK
	}
	return p
}

// send runs from_container on a packet of the pod's. The calling thread must be in the namespace.
func (h *cacheHost) send(s scene, pod, text string, edits ...func(*testenv.Packet)) (outcome, error) {
	p := h.packet(s, pod, text)
	for _, edit := range edits {
		edit(&p)
	}
	return h.tags.run(h.devices[pod], p.MustBuild())
}

// deliver sends a packet from one pod to the other. If it goes to the stack, it comes to to_container.
func (h *cacheHost) deliver(s scene, from, to, text string, edits ...func(*testenv.Packet)) (outcome, error) {
	sent, err := h.send(s, from, text, edits...)
	if err != nil || sent.verdict != verdictNext {
		return sent, err
	}
	received := outcome{tag: sent.tag}
	received.verdict, received.frame, err = h.runAt(bpf.ProgToContainer, h.devices[to], h.devices[from], sent)
	return received, err
}

// runAt runs a hook of the device on what another one, the ingress device's, has given to the stack.
func (h *cacheHost) runAt(program string, device, ingress *netlink.LinkAttrs, sent outcome) (uint32, []byte, error) {
	usual := h.veth
	h.veth, h.tag, h.ingress = device, sent.tag, uint32(ingress.Index)
	defer func() { h.veth, h.tag, h.ingress = usual, 0, 0 }()
	return h.run(program, sent.frame)
}

// wantSent sends, and wants the verdict.
func (h *cacheHost) wantSent(s scene, pod, text string, verdict uint32, edits ...func(*testenv.Packet)) error {
	got, err := h.send(s, pod, text, edits...)
	if err == nil {
		err = checkVerdict(got.verdict, verdict)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", text, err)
	}
	return nil
}

// egress is the key of what an ingress policy notes of a pod's packet.
func (s scene) egress(text string) bpf.FlowKey {
	local, remote := s.sides(text, false)
	return bpf.FlowKey{
		Remote: wire(remote.Addr()), RemotePort: remote.Port(), Local: wire(local.Addr()), LocalPort: local.Port(),
		Protocol: s.number(), Kind: bpf.FlowPolicy,
	}
}
