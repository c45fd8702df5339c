// Command ebpfnetctl shows an operator what ebpfnet has on this host, and changes it. Commands that
// are nouns only read; those that are verbs change something and print what.
//
// # How to add a command
//
// A command is a file NAME.go with a function newNAME, which root.go lists in one of its groups. It has
// Use, Short, Long, Example and Args (noWords, oneWord, or a function that returns a usageError), and all
// its lines fit 80 columns: a test reads every help.
//
// What it prints on stdout goes through an [output.Printer]. A noun has an [output.Flags] with AddToNoun,
// and an [output.Noun] with its columns: Print then does -o text, wide, json, yaml and name. Something that
// is no list is printed by Document. What is JSON has a file schema/NAME.json, to which a test holds it. The
// bug report takes each noun that needs no argument.
//
// Words on stderr are for errors, which the command returns, and for [output.Waiting].
//
// A command that looks for something returns errFound after it has printed what it has found: exit code 3.
// An argument CONTAINER is resolved by findContainer and completed by completeContainers. A command that
// takes locks uses withLocks; doctor bounds each check on its own. One that follows ends without an error
// when cmd.Context() is done, and one with a live picture uses live. What is longer than its file is a room
// of its own below this directory, in the list of plugin/imports_test.go.
//
// A new command also has its lines in README.md, and a script in test/conformance/testdata/ctl. TestCtlNouns
// holds each noun to what all nouns promise; it has the arguments that some of them need.
//
// # Rooms
//
//	drops      counters of dropped packets, and the one process that is told of each
//	doctor     checks of the host, what mends it, and the container that proves it
//	echo       whether hosts answer, and to packets of which size
//	firewall   what the host's rules do to forwarded packets
//	metrics    figures for Prometheus; the dashboard and the alert rules
//	migrate    leads networks of other plugins over to ebpfnet, and back
//	bugreport  an archive of nouns, maps and the host, without secrets
//	output     tables, JSON, YAML, names; colors; what a terminal has room for
//	runtimes   which network configuration container runtimes take, and where they look for plugins
//	screen     a picture that is drawn anew until q or Ctrl-C
//	trace      the way of a packet, by copies of the programs
//	wanted     CHECK for all containers, by what libcni's cache knows of them
//	schema     JSON schemas
//
// It may import bpf, loader, loader/rtnl, maps, plugin/config, plugin/link, plugin/nodestate,
// plugin/operator, plugin/record, plugin/show and plugin/version.
package main
