package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// quitGrace is the time for a program to print its goroutines after the SIGQUIT that -timeout causes.
const quitGrace = 10 * time.Second

// runInGuest boots the image, runs opts.command in it and returns its status.
func runInGuest(ctx context.Context, opts *options, img image) (int, error) {
	j, err := newJob(opts, img)
	if err != nil {
		return 0, fmt.Errorf("prepare guest: %w", err)
	}
	initramfs, err := buildInitramfs(opts.arch, j)
	if err != nil {
		return 0, fmt.Errorf("build initramfs: %w", err)
	}
	defer initramfs.Close()
	vm, err := startMachine(opts, j, img.kernelFile(), initramfs)
	if err != nil {
		return 0, err
	}
	status, err := superviseGuest(ctx, opts, vm)
	vm.stop() // completes the console
	if err != nil && context.Cause(ctx) == nil {
		err = fmt.Errorf("kernel %s: %w\nlast lines of the guest's console:\n%s", img.release, err, vm.console)
	}
	return status, err
}

type result struct {
	status int
	err    error
}

// superviseGuest relays output and signals until the program ends, the guest dies, the time is up or ctx
// ends.
func superviseGuest(ctx context.Context, opts *options, vm *machine) (int, error) {
	ended := make(chan result, 1)
	go func() {
		status, err := relayOutput(vm.port)
		ended <- result{status, err}
	}()
	quit := make(chan os.Signal, 1)
	signal.Notify(quit, syscall.SIGQUIT)
	defer signal.Stop(quit)

	toGuest := &frameWriter{w: vm.port}
	sendQuit := func() { _ = toGuest.send(frameSignal, []byte{byte(syscall.SIGQUIT)}) } // if the guest is dead, ended says so
	timeUp := time.After(opts.timeout)
	var graceUp <-chan time.Time
	timedOut := fmt.Errorf("timed out after %v", opts.timeout)
	for {
		select {
		case r := <-ended:
			if graceUp != nil {
				return 0, timedOut
			}
			return r.status, r.err
		case <-quit:
			go sendQuit()
		case <-timeUp:
			graceUp = time.After(quitGrace)
			go sendQuit()
		case <-graceUp:
			return 0, timedOut
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// relayOutput copies the program's output to stdout and stderr of this process, and returns the exit
// status.
func relayOutput(port io.Reader) (int, error) {
	ready := false
	for {
		kind, payload, err := readFrame(port)
		switch {
		case err != nil && !ready:
			return 0, fmt.Errorf("the guest did not boot: %w", err)
		case err != nil:
			return 0, fmt.Errorf("the guest died: %w", err)
		}
		switch kind {
		case frameReady:
			ready = true
		case frameStdout:
			_, err = os.Stdout.Write(payload)
		case frameStderr:
			_, err = os.Stderr.Write(payload)
		case frameExit:
			if len(payload) != 1 {
				return 0, errors.New("the guest sent a malformed exit status")
			}
			return int(payload[0]), nil
		default:
			return 0, fmt.Errorf("the guest sent an unknown frame %q", kind)
		}
		if err != nil {
			return 0, fmt.Errorf("relay output: %w", err)
		}
	}
}
