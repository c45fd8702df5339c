// Command ebpfnet-node turns a cluster's Node objects into routes, entries of the datapath for the prefixes of other nodes, and
// this node's conflist. It reads the API and writes nothing to it. No packet depends on it. While it is down, it misses changes,
// and pods that need policies wait.
//
// It is a module of its own, because client-go has more dependencies than all of ebpfnet.
//
// # Packages
//
//	desired    computes this node's state from nodes, configuration and this host's devices
//	binaries   installs the plugins
//	conflist   fills this node's ranges into the template
//	nodes      watches the Node objects
//	objects    watches NetworkPolicies, namespaces and pods
//	watch      keeps the objects of a kind, for both
//	policies   compiles NetworkPolicies, and changes the datapath's rules and classes
//	probe      finds the nodes that can be reached without a tunnel
//	reconcile  compares the host with the desired state and changes it
//	health     /healthz, /readyz and metrics
//
// # The loop
//
// Two goroutines change the host: that of enforcer.go changes policies, and that of agent.go everything else. The latter wakes
// when a relevant field of a node changes, when the host loses something of ours, when the host's devices change, each minute,
// and sooner after a failure. Then it lists the host's state, compares it with the desired one and changes what differs,
// whatever the event was and whatever failed before.
package main
