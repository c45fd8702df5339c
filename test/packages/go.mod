module github.com/ebpfnet/ebpfnet/test/packages

go 1.26.0

replace (
	github.com/ebpfnet/ebpfnet => ../..
	github.com/ebpfnet/ebpfnet/test => ../
)

require (
	github.com/ebpfnet/ebpfnet v0.0.0-00010101000000-000000000000
	github.com/ebpfnet/ebpfnet/test v0.0.0-00010101000000-000000000000
	github.com/vishvananda/netlink v1.3.1
	golang.org/x/sys v0.49.0
)

require (
	github.com/cilium/ebpf v0.22.0 // indirect
	github.com/containernetworking/cni v1.3.1 // indirect
	github.com/gopacket/gopacket v1.7.7 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	go.opentelemetry.io/otel v1.38.0 // indirect
	go.opentelemetry.io/otel/trace v1.38.0 // indirect
)
