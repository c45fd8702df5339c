package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// portDevice is the only port of the only virtio serial device.
const portDevice = "/dev/vport0p1"

// Exit statuses of a program that could not be started, as in a shell.
const (
	exitNotExecutable = 126
	exitNotFound      = 127
)

// drainTime is how long init keeps reading from processes that the program leaves behind with its
// stdout or stderr.
const drainTime = 2 * time.Second

// openPort waits for the driver to create the port, and opens it.
func openPort() (*os.File, error) {
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("watch /dev: %w", err)
	}
	defer unix.Close(watch)
	if _, err := unix.InotifyAddWatch(watch, filepath.Dir(portDevice), unix.IN_CREATE); err != nil {
		return nil, fmt.Errorf("watch /dev: %w", err)
	}
	events := make([]byte, 4096)
	for {
		port, err := os.OpenFile(portDevice, os.O_RDWR, 0)
		if !errors.Is(err, os.ErrNotExist) {
			return port, err
		}
		if _, err := unix.Read(watch, events); err != nil {
			return nil, fmt.Errorf("watch /dev: %w", err)
		}
	}
}

// runProgram returns only after an error: once the runner has the exit status, it ends the guest.
func runProgram(j *job, port *os.File) error {
	toHost := &frameWriter{w: port}
	if err := toHost.send(frameReady, nil); err != nil {
		return err
	}
	stdout, err := newOutput(toHost, frameStdout)
	if err != nil {
		return err
	}
	stderr, err := newOutput(toHost, frameStderr)
	if err != nil {
		return err
	}
	pid, status := startProgram(j, stdout.w, stderr.w)
	if pid != 0 {
		go relaySignals(port, pid)
		if status, err = waitFor(pid); err != nil {
			return err
		}
	}
	if err := errors.Join(stdout.finish(), stderr.finish()); err != nil {
		return err
	}
	if err := toHost.send(frameExit, []byte{byte(status)}); err != nil {
		return err
	}
	select {}
}

// startProgram returns the process id. If the program cannot be started, it writes the reason to stderr
// and returns 0 and the exit status.
func startProgram(j *job, stdout, stderr *os.File) (pid, status int) {
	pid, err := tryStart(j, stdout, stderr)
	if err == nil {
		return pid, 0
	}
	fmt.Fprintln(stderr, "vm:", err)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, exec.ErrNotFound) {
		return 0, exitNotFound
	}
	return 0, exitNotExecutable
}

func tryStart(j *job, stdout, stderr *os.File) (int, error) {
	setEnvironment(j.Env)
	if err := os.Chdir(j.Dir); err != nil {
		return 0, err
	}
	path, err := exec.LookPath(j.Command[0])
	if err != nil {
		return 0, err
	}
	stdin, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer stdin.Close()
	pid, err := syscall.ForkExec(path, j.Command, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{stdin.Fd(), stdout.Fd(), stderr.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", path, err)
	}
	return pid, nil
}

// setEnvironment adds defaults for PATH and HOME.
func setEnvironment(env []string) {
	os.Clearenv()
	defaults := []string{"HOME=/root", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, variable := range append(defaults, env...) {
		for i := range variable {
			if variable[i] == '=' && i > 0 {
				_ = os.Setenv(variable[:i], variable[i+1:]) // cannot fail for names from an environment
				break
			}
		}
	}
}

// waitFor reaps all processes, as init must, until the given one ends.
func waitFor(pid int) (status int, err error) {
	for {
		var ws syscall.WaitStatus
		ended, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case err == syscall.EINTR || err == nil && ended != pid:
			continue
		case err != nil:
			return 0, fmt.Errorf("wait for program: %w", err)
		case ws.Signaled():
			return 128 + int(ws.Signal()), nil
		default:
			return ws.ExitStatus(), nil
		}
	}
}

// relaySignals sends the runner's signals to the program.
func relaySignals(port *os.File, pid int) {
	for {
		kind, payload, err := readFrame(port)
		if err != nil {
			return
		}
		if kind == frameSignal && len(payload) == 1 {
			_ = syscall.Kill(pid, syscall.Signal(payload[0])) // it may have ended
		}
	}
}

// programOutput sends everything written to w as frames.
type programOutput struct {
	r, w *os.File
	done chan error
}

func newOutput(toHost *frameWriter, kind frameKind) (*programOutput, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	o := &programOutput{r: r, w: w, done: make(chan error, 1)}
	go func() { o.done <- toHost.copyFrom(r, kind) }()
	return o, nil
}

// finish waits until the program's output is sent.
func (o *programOutput) finish() error {
	if err := o.w.Close(); err != nil {
		return err
	}
	if err := o.r.SetReadDeadline(time.Now().Add(drainTime)); err != nil {
		return err
	}
	err := <-o.done
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}
