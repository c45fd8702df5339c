// Package bpf holds the datapath: C programs, and what bpf2go makes of them,
// which is the object code and the Go twins of the structs in abi.h.
//
// The generated files are committed, so that building needs no C compiler.
// `make generate` renews them; the C flags are in the Makefile. README.md in
// this folder tells the way of a packet and the meaning of each map.
package bpf

//go:generate go tool bpf2go -target bpfel,bpfeb -type attach -type endpoint_flags -type device_flags -type policy -type fast_path -type host_port_dir -type flow_kind -type flow_state -type offload_state -type reason -type timeouts Datapath datapath.c
