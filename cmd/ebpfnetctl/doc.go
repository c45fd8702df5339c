// Command ebpfnetctl shows the state of ebpfnet on this host, and changes it. Read commands change nothing;
// write commands print what they have changed.
//
// # How to add a command
//
// A command is a file NAME.go with a function newNAME, which root.go lists in one of its groups. It has
// Use, Short, Long, Example and Args (noWords, oneWord, or a function that returns a usageError), and all
// its lines fit 80 columns: a test reads every help.
//
// What it prints on stdout goes through an [output.Printer]. A read command has an [output.Flags] with
// AddToRead, and an [output.Table] with its columns: Print then does -o text, wide, json, yaml and name.
// Document prints what is no list. JSON has a file schema/NAME.json, which a test compares. The bug report
// takes each read command that needs no argument.
//
// stderr is for errors, which the command returns.
//
// A command that looks for something returns errFound after it has printed what it has found: exit code 3.
// findContainer resolves an argument CONTAINER, and completeContainers completes it. A command that takes
// locks uses withLocks; doctor bounds each check on its own. One that follows ends without an error when
// cmd.Context() is done. What is longer than its file is a package below this directory, in the list of
// plugin/imports_test.go.
//
// A new command also has its lines in README.md, and a script in test/conformance/testdata/ctl. TestCtlRead
// tests what all read commands have in common; it has the arguments that some of them need.
//
// # Packages
//
//	containers names of containers, by libcni's cache and containerd
//	drops      counters of dropped packets, and the one process that follows each
//	doctor     checks of the host, its containers and other nodes, fixes, and the container that proves it
//	firewall   chains that drop forwarded packets, and a trace by the kernel
//	migrate    migrates networks of other plugins to ebpfnet, and back
//	bugreport  an archive of what the commands and the host print, without secrets
//	output     tables, JSON, YAML, names
//	runtimes   which network configuration container runtimes take, and where they look for plugins
//	trace      the path of a packet, by copies of the programs
//	schema     JSON schemas
//
// It may import bpf, loader, loader/rtnl, maps, plugin/config, plugin/link, plugin/nodestate,
// plugin/admin, plugin/record, plugin/show and plugin/version.
package main
