// Package bpf has the datapath: the programs in C, and the files that bpf2go
// generates from them, which are the object code and Go types for the structs in
// abi.h.
//
// The generated files are committed, so building needs no C compiler. `make
// generate` renews them; the C flags are in the Makefile. README.md describes the
// path of a packet and each map.
package bpf

//go:generate go tool bpf2go -target bpfel,bpfeb -type attach -type endpoint_flags -type device_flags -type fast_path -type host_port_dir -type flow -type flow_entry -type ct_nat -type offload -type flow_kind -type flow_state -type flow_flags -type offload_state -type peer_kind -type rule_set_flags -type policy_checks -type reason -type drop_event -type port_range -type fwd_key -type fwd_entry -type fwd_flags -type fwd_action -type fwd_nat -type node_mode -type prefix -type stack_hook Datapath datapath.c
//go:generate go tool bpf2go -no-global-types -target bpfel,bpfeb StackDrops stack_drops.c
