// Command ebpfnet-node turns a cluster's Node objects into routes, an entry of the datapath for each prefix of
// other nodes, and this node's conflist. It reads the API and writes nothing to it. Nothing of it runs while
// packets flow or pods start: without it only new nodes are not learned.
//
// It is a module of its own, because client-go has more dependencies than all of ebpfnet.
//
// # Rooms
//
//	wanted     what this node is to have: a pure function of nodes, configuration and this host's devices
//	binaries   the plugins, where the runtime looks for them
//	conflist   the operator's template with this node's ranges
//	nodes      the Node objects, as the API server tells them
//	probe      which nodes of a link containers' addresses may pass to
//	reconcile  what the host has, how that differs from what is wanted, and the changes
//	health     /healthz, /readyz and figures
//
// # The loop
//
// agent.go has the only goroutine that changes anything. It wakes when a node has changed that counts, when the
// host has lost something of ours or its own devices have changed, each minute, and sooner after a failure. Then
// it lists what is there, compares and changes: it makes no difference what has woken it, what has failed before,
// or how long the agent was away.
package main
