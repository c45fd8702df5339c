package firewall

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// traceTable marks the packets to trace. Since Linux 5.12 it ends with the process that made it; before, Stop or the
// next Trace removes it.
const traceTable = "inet ebpfnet_trace"

// Trace has the kernel report what the rules of nftables do to packets from and to addresses.
type Trace struct {
	tool  *exec.Cmd
	lines chan []string // all lines, after the end of the tool
}

// StartTrace runs nft, which makes the table and prints the kernel's reports. The caller must call Stop.
func StartTrace(addresses []netip.Addr) (*Trace, error) {
	t := &Trace{tool: exec.Command("nft", "-i"), lines: make(chan []string, 1)}
	if t.tool.Err != nil { // there is no nft
		return nil, t.tool.Err
	}
	t.tool.Env = append(t.tool.Environ(), "HOME=/dev/null") // no file with the history of commands
	t.tool.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	input, errInput := t.tool.StdinPipe()
	output, errOutput := t.tool.StdoutPipe()
	if err := errors.Join(errInput, errOutput); err != nil {
		return nil, err
	}
	t.tool.Stderr = t.tool.Stdout
	ready := make(chan error, 2)
	go t.read(output, ready)
	_, err := io.WriteString(input, commands(addresses)) // the pipe takes them before the tool runs
	if err == nil {
		err = <-ready
	}
	if err != nil {
		t.Stop()
		return nil, fmt.Errorf("nft: %w", err)
	}
	return t, nil
}

// read starts the tool and reads what it prints until it ends.
func (t *Trace) read(output io.Reader, ready chan<- error) {
	runtime.LockOSThread() // the kernel sends Pdeathsig when this thread ends
	defer runtime.UnlockOSThread()
	if err := t.tool.Start(); err != nil {
		ready <- err
		t.lines <- nil
		return
	}
	var lines []string
	for scanner := bufio.NewScanner(output); scanner.Scan(); {
		switch line := scanner.Text(); {
		case strings.HasPrefix(line, "table "+traceTable):
			ready <- nil
		case strings.HasPrefix(line, "list table "+traceTable): // below an error
			ready <- errors.New("it cannot make a table")
		default:
			lines = append(lines, line)
		}
	}
	ready <- errors.New("it has ended")
	t.lines <- lines
}

// commands returns the commands for nft, which continues after one that fails: without a table to delete, and where the
// kernel knows no owners.
func commands(addresses []netip.Addr) string {
	text := "delete table " + traceTable + "\nadd table " + traceTable + " { flags owner; }\nadd table " + traceTable + "\n"
	for _, hook := range []string{"prerouting", "output"} {
		text += fmt.Sprintf("add chain %s %s { type filter hook %s priority -350; }\n", traceTable, hook, hook)
		for _, address := range addresses {
			ip := "ip"
			if address.Is6() {
				ip = "ip6"
			}
			for _, end := range []string{"saddr", "daddr"} {
				text += fmt.Sprintf("add rule %s %s %s %s %s meta nftrace set 1\n", traceTable, hook, ip, end, address)
			}
		}
	}
	return text + "list table " + traceTable + "\nmonitor trace\n"
}

// Stop ends the trace and returns what dropped which packets, each once.
func (t *Trace) Stop() (drops []string) {
	if t.tool.Process != nil {
		_ = syscall.Kill(-t.tool.Process.Pid, syscall.SIGKILL) // the process is not yet waited for
	}
	lines := <-t.lines
	_ = t.tool.Wait()                                                   // it was killed
	_, _ = run(context.Background(), "nft", "delete table "+traceTable) // only kernels before 5.12 still have it
	return dropsOf(lines)
}

var (
	tracedPacket  = regexp.MustCompile(`^trace id (\S+) .* packet: .*?(ip6? saddr \S+ ip6? daddr \S+)`)
	tracedVerdict = regexp.MustCompile(`^trace id (\S+) (\S+ \S+) (\S+) (rule .*) ?\(verdict drop\)|^trace id (\S+) (\S+ \S+) (\S+) (policy drop)`)
)

// dropsOf returns the verdicts in what `nft monitor trace` prints.
func dropsOf(lines []string) (drops []string) {
	packets := map[string]string{} // by id
	for _, line := range lines {
		if m := tracedPacket.FindStringSubmatch(line); m != nil {
			packets[m[1]] = m[2]
		}
		m := tracedVerdict.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		if m[1] == "" {
			m = m[4:]
		}
		drop := fmt.Sprintf("chain %s of table %s drops %s: %s", m[3], m[2], packets[m[1]], strings.TrimSpace(m[4]))
		if !slices.Contains(drops, drop) {
			drops = append(drops, drop)
		}
	}
	return drops
}
