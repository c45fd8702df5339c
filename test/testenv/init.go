package testenv

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// initEnv marks the first process of a host that has mounts and processes of its own, and has its argument.
const initEnv = "EBPFNET_TESTENV_INIT"

// StartInit makes the namespace a host with mounts and processes of its own, inside this process's, and whatever else
// the flags say (CLONE_NEWUTS). It starts this program again as the first process there, and waits until [RunInit] has
// prepared it. The end of the test ends this process, and the kernel all others of the host.
func (ns *Namespace) StartInit(tb TB, argument string, flags uintptr) (pid int) {
	tb.Helper()
	cmd := isolatedCommand(flags)
	cmd.Env = append(cmd.Env, initEnv+"="+argument)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	if err := ns.Do(cmd.Start); err != nil {
		tb.Fatalf("start the first process of %s: %v", ns.Name, err)
	}
	tb.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			tb.Fatalf("first process of %s: %v", ns.Name, err)
		}
	})
	if _, err := io.ReadFull(stdout, make([]byte, 1)); err != nil {
		tb.Fatalf("wait for the mounts of %s: %v", ns.Name, err)
	}
	return cmd.Process.Pid
}

// RunInit does nothing but in the process that [Namespace.StartInit] has started. There it isolates this process, has
// it prepared, and reaps the processes of others until the test ends; it does not return. TestMain calls it first.
func RunInit(prepare func(argument string) error) {
	argument, isInit := os.LookupEnv(initEnv)
	if !isInit {
		return
	}
	Isolate()
	if err := prepare(argument); err != nil {
		fatal(fmt.Errorf("prepare %s: %w", argument, err))
	}
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	go func() {
		for range children {
			for pid := 1; pid > 0; {
				pid, _ = syscall.Wait4(-1, nil, unix.WNOHANG, nil)
			}
		}
	}()
	os.Stdout.WriteString("\n")
	io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// OwnDirectories makes directories empty, and /etc this process's own without networks of CNI.
func OwnDirectories(dirs ...string) error {
	for _, dir := range dirs {
		if err := mount("tmpfs", dir, 0, "mode=0755"); err != nil {
			return err
		}
	}
	if err := errors.Join(os.MkdirAll("/run/etc/upper", 0o755), os.MkdirAll("/run/etc/work", 0o755)); err != nil {
		return err
	}
	if err := mount("overlay", "/etc", 0, "lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work"); err != nil {
		return err
	}
	return os.RemoveAll("/etc/cni")
}
