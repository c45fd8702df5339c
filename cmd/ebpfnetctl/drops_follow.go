package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	ours "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

const (
	dropsRead  = 100 * time.Millisecond // how often the ring is read: with its size, the bound of what is printed
	dropsRenew = time.Second
)

type follower struct {
	options   dropOptions
	printer   *output.Printer
	reader    *drops.Reader
	describer drops.Describer
}

// followDrops prints drops until the command is interrupted, or nobody reads its output.
func followDrops(cmd *cobra.Command, p *output.Printer, o dropOptions) (err error) {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return err
	}
	defer datapath.Close()
	f := &follower{options: o, printer: p}
	filter, err := f.filter()
	if err != nil {
		return err
	}
	stack, errStack := drops.ReadStack()
	if errStack == nil && filter.Reasons == nil {
		filter.Stack = &drops.StackFilter{Stack: stack, Reason: o.reason}
	}
	f.describer = drops.Describer{Stack: stack, DataDir: o.dirs.data, CacheDir: o.dirs.cache, State: nodestate.Default, Bytes: o.bytes}
	defer f.describer.Close()
	if err := f.describer.Open(datapath); err != nil {
		return err
	}
	if f.reader, err = drops.Open(cmd.Context(), datapath, filter); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.reader.Close()) }()
	if err := f.warn(cmd, filter, errors.Join(errStack, f.reader.StackErr)); err != nil {
		return err
	}
	return f.run(cmd)
}

func (f *follower) filter() (filter drops.Filter, err error) {
	filter.Limit = f.options.limit
	if reason, ok := ours.ParseReason(f.options.reason); ok {
		filter.Reasons = []ours.Reason{reason}
	}
	if len(f.options.words) == 0 {
		return filter, nil
	}
	_, attachments, err := f.options.attachments()
	if attachments == nil {
		return filter, err
	}
	if len(attachments) > drops.MaxOwners {
		return filter, fmt.Errorf("%s has %d interfaces, and only %d can be followed: name one, as NETWORK/CONTAINER/INTERFACE",
			f.options.words[0], len(attachments), drops.MaxOwners)
	}
	for _, a := range attachments {
		owner, err := strconv.ParseUint(a.Owner, 16, 64)
		if err != nil {
			return filter, err
		}
		filter.Owners = append(filter.Owners, loader.Owner(owner))
	}
	return filter, err
}

// warn prints what the kernel cannot report. That is an error if --reason asks for nothing else.
func (f *follower) warn(cmd *cobra.Command, filter drops.Filter, err error) error {
	switch {
	case filter.Reasons != nil:
	case err != nil && f.options.reason != "":
		return fmt.Errorf("drops --reason %s: %w", f.options.reason, err)
	case err != nil:
		output.Printf(cmd.ErrOrStderr(), "ebpfnetctl: drops of the host's own stack are not reported: %v\n", err)
	case !filter.Stack.HasReasons():
		output.Printf(cmd.ErrOrStderr(), "ebpfnetctl: this kernel reports no reasons for drops of the host's stack (before 5.17), only the function\n")
	}
	return nil
}

func (f *follower) run(cmd *cobra.Command) error {
	signal.Ignore(syscall.SIGPIPE) // a write fails instead
	defer signal.Reset(syscall.SIGPIPE)
	ctx, cancel := context.WithCancel(cmd.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- f.keepAlive(ctx, cmd.ErrOrStderr())
		close(ended)
	}()
	defer func() { cancel(); <-ended }() // a reader that has stopped must not come back
	read, count := time.NewTicker(dropsRead), time.NewTicker(dropsRenew)
	defer read.Stop()
	defer count.Stop()
	for {
		var err error
		select {
		case err := <-ended:
			if err != nil {
				return err
			}
			return errors.Join(f.reader.Stop(), f.print(), f.printLeftOut())
		case <-read.C:
			err = f.print()
		case <-count.C:
			err = f.printLeftOut()
		}
		if f.isAlone(cmd) {
			return nil // also with JSON, where printing then fails
		}
		if err != nil {
			return err
		}
	}
}

// keepAlive renews the reader's lease until the end of ctx, even while output blocks: the programs then count what is left
// out. It warns if this process did not run for so long that its lease ended.
func (f *follower) keepAlive(ctx context.Context, warnings io.Writer) error {
	ticker := time.NewTicker(dropsRenew)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		missed, err := f.reader.Renew()
		if err != nil {
			return err
		}
		if missed > 0 {
			output.Printf(warnings, "ebpfnetctl: nothing was reported for %s, because this process did not run\n", missed.Round(time.Second).String())
		}
	}
}

// isAlone reports whether nobody reads the standard output, and forgets that writing to it failed.
func (f *follower) isAlone(cmd *cobra.Command) bool {
	out, ok := cmd.OutOrStdout().(*output.File)
	if !ok {
		return false
	}
	if errors.Is(out.Err, unix.EPIPE) {
		out.Err = nil
		return true
	}
	fds := []unix.PollFd{{Fd: int32(out.Fd())}}
	n, err := unix.Poll(fds, 0)
	return out.Err != nil || err == nil && n == 1 && fds[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0
}

func (f *follower) print() error {
	var errs []error
	err := f.reader.Read(func(event *bpf.DropEvent) {
		drop, err := f.describer.Describe(event)
		errs = append(errs, err, f.printDrop(drop))
	})
	return errors.Join(append(errs, err)...)
}

func (f *follower) printDrop(d drops.Drop) error {
	switch {
	case f.printer.ForPrograms():
		return f.printer.Line(d)
	case f.printer.Format == output.Name:
		f.printer.Printf("%s\n", containerName(d.Named))
		return nil
	}
	words := []string{d.Time.Local().Format("15:04:05.000000"), cmp.Or(d.Reason, "dropped"), cmp.Or(d.Title(), "-"), d.Protocol}
	if d.Source != "" {
		words = append(words, d.Source, ">", d.Destination)
	}
	words = append(words, fmt.Sprintf("len %d", d.Length), cmp.Or(d.Hook, "stack"), d.Device)
	text := strings.Join(words, " ")
	switch {
	case d.Meaning != "":
		text += ": " + d.Meaning
	case d.Function != "":
		text += ": in " + d.Function
	}
	if d.RuleSet != "" {
		isolated := ""
		if len(d.Policies) > 0 {
			isolated = " isolated by " + strings.Join(d.Policies, ", ")
		}
		text += fmt.Sprintf(" (%s%s: %s)", d.RuleSet, isolated, d.Why)
	}
	f.printer.Printf("%s\n", text)
	if len(d.Raw) > 0 {
		f.printer.Printf("%s", output.Raw(hex.Dump(d.Raw)))
	}
	return nil
}

func (f *follower) printLeftOut() error {
	counts, err := f.reader.LeftOut()
	if err != nil || len(counts) == 0 {
		return err
	}
	l := drops.LeftOutOf(counts)
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(l.ByReason)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, l.ByReason[name]))
	}
	if f.printer.ForPrograms() {
		return f.printer.Line(l)
	}
	if f.printer.Format != output.Name {
		f.printer.Printf("%s %d more were left out: %s\n", l.Time.Local().Format("15:04:05.000000"), l.LeftOut, strings.Join(parts, ", "))
	}
	return nil
}
