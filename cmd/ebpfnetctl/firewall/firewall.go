// Package firewall finds the chains of the host's firewall that drop forwarded packets unless a rule accepts them. It
// does not interpret rules: Trace has the kernel report what they do to packets. It reads nftables, and both kinds of
// iptables, with the tools that are installed.
package firewall

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Chain is a base chain of the hook forward.
type Chain struct {
	Family, Table, Name string
	Priority            int
	Drops               string // the policy or the rule that drops what no rule before accepts; "" if there is none
	IsLegacy            bool   // of iptables-legacy: the kernel does not trace its rules
}

// String names the chain in a message.
func (c Chain) String() string {
	tool := "nftables"
	if c.IsLegacy {
		tool = "iptables-legacy"
	}
	return fmt.Sprintf("chain %s of table %s %s (%s, priority %d)", c.Name, c.Family, c.Table, tool, c.Priority)
}

// Applies reports whether packets of a subnet's family reach the chain.
func (c Chain) Applies(subnet netip.Prefix) bool {
	return c.Family == "inet" || (c.Family == "ip") == subnet.Addr().Is4()
}

// Rules are the chains of the hook forward in the calling thread's network namespace.
type Rules struct {
	Forward []Chain
	Unread  []string // what could not be read, and why
}

// Read reads the chains of nftables and of iptables-legacy.
func Read(ctx context.Context) *Rules {
	r := &Rules{}
	text, err := run(ctx, "nft", "-j", "list", "ruleset")
	if err == nil && len(bytes.TrimSpace(text)) > 0 {
		err = r.addNFTables(text)
	}
	if err != nil && !errors.Is(err, exec.ErrNotFound) {
		r.Unread = append(r.Unread, fmt.Sprintf("nft: %v", err))
	}
	for _, family := range []string{"ip", "ip6"} {
		if err := r.addLegacy(ctx, family); err != nil {
			r.Unread = append(r.Unread, fmt.Sprintf("%stables-legacy-save: %v", family, err))
		}
	}
	return r
}

// ruleset is what `nft -j list ruleset` prints, as far as it matters here.
type ruleset struct {
	NFTables []struct {
		Chain *struct {
			Family, Table, Name, Hook, Policy string
			Prio                              int
		}
		Rule *struct {
			Family, Table, Chain string
			Handle               int
			Expr                 []map[string]json.RawMessage
		}
	}
}

func (r *Rules) addNFTables(text []byte) error {
	var all ruleset
	if err := json.Unmarshal(text, &all); err != nil {
		return err
	}
	for _, object := range all.NFTables {
		switch c, rule := object.Chain, object.Rule; {
		case c != nil && c.Hook == "forward" && slices.Contains([]string{"ip", "ip6", "inet"}, c.Family):
			chain := Chain{Family: c.Family, Table: c.Table, Name: c.Name, Priority: c.Prio}
			if c.Policy == "drop" {
				chain.Drops = "its policy is drop"
			}
			r.Forward = append(r.Forward, chain)
		case rule != nil && dropsAll(rule.Expr):
			for i, c := range r.Forward {
				if c.Family == rule.Family && c.Table == rule.Table && c.Name == rule.Chain {
					r.Forward[i].Drops = fmt.Sprintf("its rule with handle %d matches all packets", rule.Handle)
				}
			}
		}
	}
	return nil
}

// dropsAll reports whether a rule drops or rejects every packet.
func dropsAll(expr []map[string]json.RawMessage) bool {
	for _, statement := range expr {
		for kind, value := range statement {
			switch kind {
			case "drop", "reject":
				return true
			case "xt":
				return strings.Contains(string(value), `"REJECT"`)
			case "counter", "log":
			default:
				return false
			}
		}
	}
	return false
}

var legacyDrop = regexp.MustCompile(`(?m)^:FORWARD DROP|^-A FORWARD -j (DROP|REJECT)`)

// addLegacy adds the chain FORWARD of iptables-legacy, if the kernel has its table filter.
func (r *Rules) addLegacy(ctx context.Context, family string) error {
	tables, err := os.ReadFile("/proc/net/" + family + "_tables_names")
	if err != nil || !strings.Contains(string(tables), "filter") {
		return nil
	}
	text, err := run(ctx, family+"tables-legacy-save", "-t", "filter")
	if errors.Is(err, exec.ErrNotFound) {
		text, err = run(ctx, family+"tables-save", "-t", "filter") // before there were two kinds
	}
	if err != nil {
		return err
	}
	chain := Chain{Family: family, Table: "filter", Name: "FORWARD", IsLegacy: true}
	if legacyDrop.Match(text) {
		chain.Drops = "its policy or a rule drops all packets"
	}
	r.Forward = append(r.Forward, chain)
	return nil
}

// Accept returns the command that lets the packets of a subnet pass the chain. A tool that restores its rules, such as
// ufw, needs a rule of its own to keep that.
func (c Chain) Accept(subnet netip.Prefix) string {
	ip, iptables := "ip", "iptables"
	if subnet.Addr().Is6() {
		ip, iptables = "ip6", "ip6tables"
	}
	if c.IsLegacy {
		iptables += "-legacy"
	}
	switch {
	case c.Table == "firewalld": // it owns its table
		return fmt.Sprintf("firewall-cmd --permanent --zone=trusted --add-source=%s && firewall-cmd --reload", subnet)
	case c.Table != "filter" || c.Name != "FORWARD": // not iptables'
		rule := fmt.Sprintf("nft insert rule %s %s %s %s", c.Family, c.Table, c.Name, ip)
		return fmt.Sprintf("%s saddr %s accept && %s daddr %s accept", rule, subnet, rule, subnet)
	}
	return fmt.Sprintf("%s -I FORWARD -s %s -j ACCEPT && %s -I FORWARD -d %s -j ACCEPT", iptables, subnet, iptables, subnet)
}

// patience is how long a tool may take: with many rules, seconds.
var patience = 10 * time.Second

// run executes a tool and returns what it prints. At the end of patience it kills the tool and its children.
func run(ctx context.Context, name string, args ...string) ([]byte, error) {
	inTime, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(inTime, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	switch {
	case inTime.Err() != nil && ctx.Err() == nil:
		return nil, fmt.Errorf("no answer within %s", patience)
	case err != nil:
		return nil, fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}
