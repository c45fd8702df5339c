// Package testenv gives tests and the demo a private machine to work on: a
// process in its own mount, network and PID namespaces, network namespaces and
// topologies inside it, a container runtime that drives the plugin, traffic,
// and an independent model of packets.
//
// Nothing here is safe to use before [Main] or [Isolate] has run, and every
// constructor refuses to.
package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// isolatedEnv marks the re-executed process. PID 1 must hold as well, so that a
// program started by an isolated one isolates itself again.
const isolatedEnv = "EBPFNET_TESTENV_ISOLATED"

// isolated is set once the process is in its own namespaces.
var isolated bool

// The main goroutine keeps the main thread, for two reasons. The kernel shows
// that thread's namespaces as the process's own, so no disposable goroutine of
// onThread may ever run on it. And the parent's death signal follows the
// thread that started the child.
func init() { runtime.LockOSThread() }

// Isolate re-executes the running program once, with the same arguments, in new
// mount, network and PID namespaces, and returns only in there. /run, /sys, bpffs
// and the CNI directories under /var/lib are then new and empty, the only link is
// lo, and the process is PID 1: when it ends, however it ends, the kernel kills
// what it started and drops every mount, namespace and pin. The calling process
// waits, passes signals on and exits with the same code.
//
// Where the namespaces are refused, Isolate prints why and exits with 1.
func Isolate() {
	if isolated {
		return
	}
	if os.Getpid() == 1 && os.Getenv(isolatedEnv) != "" {
		os.Unsetenv(isolatedEnv)
		if err := setup(); err != nil {
			fatal(fmt.Errorf("prepare isolated environment: %w", err))
		}
		isolated = true
		return
	}
	code, err := reexec()
	if err != nil {
		fatal(err)
	}
	os.Exit(code)
}

func fatal(err error) {
	fmt.Fprintf(os.Stderr, "testenv: %v\n", err)
	os.Exit(1)
}

// reexec runs this program again, isolated, and returns its exit code.
func reexec() (int, error) {
	if os.Geteuid() != 0 {
		return 0, errors.New("network and mount namespaces need root: run this with sudo")
	}

	// Before the start, so that no signal finds the child without its parent.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2)

	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), isolatedEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID,
		Pdeathsig:  unix.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start a process in its own namespaces, which needs CAP_SYS_ADMIN (in a container: --privileged): %w", err)
	}
	go func() {
		for sig := range signals {
			if !sentByTerminal(sig) {
				cmd.Process.Signal(sig)
			}
		}
	}()

	err := cmd.Wait()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return 0, fmt.Errorf("wait for isolated process: %w", err)
	}
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		fmt.Fprintf(os.Stderr, "testenv: isolated process killed: %v\n", status.Signal())
		return 128 + int(status.Signal()), nil
	}
	return status.ExitStatus(), nil
}

// sentByTerminal reports whether sig probably came from the keyboard, which
// signals the whole foreground group, so that the child has got it already.
func sentByTerminal(sig os.Signal) bool {
	if sig != unix.SIGINT && sig != unix.SIGQUIT {
		return false
	}
	group, err := unix.IoctlGetInt(unix.Stdin, unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}
