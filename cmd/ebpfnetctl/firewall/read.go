package firewall

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// patience is how long one tool may take: with many rules, seconds.
var patience = 10 * time.Second

// Read reads all rules of the calling thread's network namespace. What cannot be read is in Unread.
func Read(ctx context.Context) *Rules {
	r := &Rules{chains: map[string]*chain{}}
	isRead := r.readIPTables(ctx)
	out, err := run(ctx, "nft", "-j", "list", "ruleset")
	if err == nil && len(bytes.TrimSpace(out)) > 0 {
		err = r.addNFTables(out, func(family, table string) bool { return isRead[family+" "+table] })
	}
	r.failed("nft", err)
	return r
}

// readIPTables returns the tables of nftables that iptables has made, and has shown.
func (r *Rules) readIPTables(ctx context.Context) (isRead map[string]bool) {
	isRead = map[string]bool{}
	for _, family := range []string{"ip", "ip6"} {
		name := family + "tables"
		out, err := run(ctx, name+"-nft-save")
		r.failed(name+"-nft-save", err)
		// A table that nft has changed is "incompatible", and nft prints it.
		if err == nil {
			r.addIPTables(IPTables, family, string(out))
			for line := range strings.Lines(string(out)) {
				if table, ok := strings.CutPrefix(strings.TrimSpace(line), "*"); ok {
					isRead[family+" "+table] = true
				}
			}
		}
		tables, err := os.ReadFile("/proc/net/" + family + "_tables_names")
		if err != nil || len(tables) == 0 {
			continue // no legacy rules
		}
		out, err = run(ctx, name+"-legacy-save")
		if errors.Is(err, exec.ErrNotFound) {
			out, err = run(ctx, name+"-save") // before there were two kinds
		}
		if errors.Is(err, exec.ErrNotFound) {
			r.Unread = append(r.Unread, fmt.Sprintf("the kernel has legacy rules of %s, and %s-legacy-save is not installed", name, name))
			continue
		}
		r.failed(name+"-legacy-save", err)
		r.addIPTables(Legacy, family, string(out))
	}
	return isRead
}

// failed notes what could not be read. A tool that is not installed has no rules.
func (r *Rules) failed(tool string, err error) {
	if err != nil && !errors.Is(err, exec.ErrNotFound) {
		r.Unread = append(r.Unread, fmt.Sprintf("%s: %v", tool, err))
	}
}

// run executes a tool, also where PATH has no directories for root. One that hangs costs no other its time.
func run(ctx context.Context, name string, args ...string) ([]byte, error) {
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin/", "/sbin/"} {
		if err == nil {
			break
		}
		path, err = exec.LookPath(dir + name)
	}
	if err != nil {
		return nil, exec.ErrNotFound
	}
	inTime, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(inTime, path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // with its children
	cmd.WaitDelay = time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if inTime.Err() != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("no answer within %s", patience)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}
