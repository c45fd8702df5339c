// Package testenv gives tests, the demo and the benchmark a private machine: a process in its
// own mount, network and PID namespaces, with network namespaces and topologies, a container
// runtime that runs the plugin, traffic, and an independent model of packets.
//
// Call [Main] or [Isolate] first: constructors fail in a process that is not isolated.
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

// isolatedEnv marks the re-executed process, together with PID 1: a program that inherits the
// variable must isolate itself again.
const isolatedEnv = "EBPFNET_TESTENV_ISOLATED"

// isolated is set once the process is in its own namespaces.
var isolated bool

// The main goroutine keeps the main thread, for two reasons. The kernel shows that thread's
// namespaces as the process's own, so onThread must not use it. And the kernel sends the
// parent death signal when the thread that started the child ends.
func init() { runtime.LockOSThread() }

// Isolate re-executes the running program once, with the same arguments, in new mount, network
// and PID namespaces, and returns only there. /run, /sys, bpffs and the CNI directories under
// /var/lib are then new and empty, the only link is lo, and the process is PID 1: when it ends
// for whatever reason, the kernel kills its children and removes all mounts, namespaces and
// pins. The calling process waits, relays signals and exits with the same code.
//
// If the kernel refuses the namespaces, Isolate prints the reason and exits with 1.
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

	// Before the start, so that no signal kills only the parent.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2)

	cmd := isolatedCommand(unix.CLONE_NEWNET)
	cmd.Stdin, cmd.Stdout = os.Stdin, os.Stdout
	cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
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

// isolatedCommand returns a command that runs this program again, in namespaces of its own: [Isolate] returns there.
func isolatedCommand(namespaces uintptr) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), isolatedEnv+"=1")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | namespaces}
	return cmd
}

// sentByTerminal reports whether sig probably came from the keyboard. The terminal signals the
// whole foreground process group, so the child has received it already.
func sentByTerminal(sig os.Signal) bool {
	if sig != unix.SIGINT && sig != unix.SIGQUIT {
		return false
	}
	group, err := unix.IoctlGetInt(unix.Stdin, unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}
