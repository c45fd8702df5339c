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
package main
