// Package firewall finds the chains of the host's firewall that drop forwarded packets unless a rule accepts them. It
// does not interpret rules: Trace has the kernel report what they do to packets. It reads nftables, and both kinds of
// iptables, with the tools that are installed.
//
// It imports no other package of this module.
package firewall

import (
	"bytes"
	"cmp"
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
	manager             string // the tool that restores the rules, if there is one
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
	managers := map[string]string{} // by family and table
	for _, object := range all.NFTables {
		if c := object.Chain; c != nil {
			if manager := managerOf(c.Table, c.Name); manager != "" {
				managers[c.Family+" "+c.Table] = manager
			}
		}
	}
	for _, object := range all.NFTables {
		switch c, rule := object.Chain, object.Rule; {
		case c != nil && c.Hook == "forward" && slices.Contains([]string{"ip", "ip6", "inet"}, c.Family):
			chain := Chain{Family: c.Family, Table: c.Table, Name: c.Name, Priority: c.Prio, manager: managers[c.Family+" "+c.Table]}
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

var (
	legacyDrop  = regexp.MustCompile(`(?m)^:FORWARD DROP|^-A FORWARD -j (DROP|REJECT)`)
	legacyChain = regexp.MustCompile(`(?m)^:(\S+)`)
)

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
	for _, name := range legacyChain.FindAllStringSubmatch(string(text), -1) {
		chain.manager = cmp.Or(chain.manager, managerOf(chain.Table, name[1]))
	}
	r.Forward = append(r.Forward, chain)
	return nil
}

const docker, ufw, firewalld = "Docker", "ufw", "firewalld"

// managerOf returns the tool that makes a chain and restores it: its rules are changed with that tool.
func managerOf(table, chain string) string {
	switch {
	case table == "firewalld":
		return firewalld
	case chain == "DOCKER-USER":
		return docker
	case chain == "ufw-user-forward" || chain == "ufw6-user-forward":
		return ufw
	}
	return ""
}

// Accept returns the command that lets the packets of a subnet pass the chain.
func (c Chain) Accept(subnet netip.Prefix) string {
	ip, iptables := "ip", "iptables"
	if subnet.Addr().Is6() {
		ip, iptables = "ip6", "ip6tables"
	}
	if c.IsLegacy {
		iptables += "-legacy"
	}
	position := c.Name
	switch {
	case c.manager == firewalld:
		return fmt.Sprintf("firewall-cmd --permanent --zone=trusted --add-source=%s && firewall-cmd --reload", subnet)
	case c.manager == ufw:
		return fmt.Sprintf("ufw route allow from %s && ufw route allow to %s", subnet, subnet)
	case c.manager == docker:
		position = "DOCKER-USER"
	case c.Table != "filter" || c.Name != "FORWARD": // not iptables'
		rule := fmt.Sprintf("nft insert rule %s %s %s %s", c.Family, c.Table, c.Name, ip)
		return fmt.Sprintf("%s saddr %s accept && %s daddr %s accept", rule, subnet, rule, subnet)
	}
	return fmt.Sprintf("%s -I %s -s %s -j ACCEPT && %s -I %s -d %s -j ACCEPT", iptables, position, subnet, iptables, position, subnet)
}

// find returns the path of a tool, also if PATH lacks the directories for root.
func find(name string) (string, error) {
	for _, dir := range []string{"", "/usr/sbin/", "/sbin/"} {
		if path, err := exec.LookPath(dir + name); err == nil {
			return path, nil
		}
	}
	return "", exec.ErrNotFound
}

// patience is how long a tool may take: with many rules, seconds.
var patience = 10 * time.Second

// run executes a tool and returns what it prints. At the end of patience it kills the tool and its children.
func run(ctx context.Context, name string, args ...string) ([]byte, error) {
	path, err := find(name)
	if err != nil {
		return nil, err
	}
	inTime, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(inTime, path, args...)
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
