package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
)

// The exit codes.
const (
	exitGood  = 0
	exitError = 1
	exitUsage = 2 // wrong arguments
	exitFound = 3 // a command that looks for something, such as differences, has found it
)

// errFound makes a command exit with exitFound after it has printed what it has found.
var errFound = errors.New("found something")

// usageError reports wrong arguments.
type usageError struct{ error }

func main() {
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin") // where a user's PATH may lack root's tools
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], &output.File{File: os.Stdout}, os.Stderr)
	stop()
	os.Exit(code)
}

// run returns the exit code. ctx ends commands that wait or follow.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if file, ok := stdout.(*output.File); ok && file.Err != nil {
		err = file.Err
	}
	switch {
	case err == nil:
		return exitGood
	case errors.Is(err, errFound):
		return exitFound
	case errors.As(err, new(usageError)):
		output.Printf(stderr, "ebpfnetctl: %v (%s)\n", err, whereToRead(root, cmd))
		return exitUsage
	case errors.Is(err, loader.ErrNotLoaded):
		output.Printf(stderr, "ebpfnetctl: %v (the first ADD loads it; `ebpfnetctl doctor` checks this host)\n", err)
		return exitError
	default:
		output.Printf(stderr, "ebpfnetctl: %v\n", err)
		return exitError
	}
}

// whereToRead names the command that prints help, for an error about wrong arguments.
func whereToRead(root, cmd *cobra.Command) string {
	if cmd == root || cmd.Name() == "help" {
		return "`ebpfnetctl help` lists the commands"
	}
	return "see `ebpfnetctl help " + strings.TrimPrefix(cmd.CommandPath(), root.Name()+" ") + "`"
}
