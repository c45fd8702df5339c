// Package doctor looks for what keeps ebpfnet from working on a host. It is a table of small checks, each of which
// reports what it has found, what that means, and what to do. It fixes what is safe to fix, and proves with a container
// of its own, and with packets to other nodes, that packets arrive.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

// State says how something is.
type State string

// The states.
const (
	Good    State = "good"
	Fixed   State = "fixed"   // it was wrong before --fix
	Warning State = "warning" // it does harm in some cases
	Wrong   State = "wrong"
	Unknown State = "unknown" // the check could not look
)

// Finding is what a check has found: a line.
type Finding struct {
	Check  string `json:"check"`
	State  State  `json:"state"`
	What   string `json:"what"`             // what was found, and what it means
	Remedy string `json:"remedy,omitempty"` // what to do
	fix    *fix
}

type check struct {
	name string
	look func(context.Context, *host) ([]Finding, error)
}

// checks are all checks, in the order in which one needs another.
var checks = []check{
	{"kernel", lookKernel},
	{"bpffs", lookBPFFS},
	{"datapath", lookDatapath},
	{"conflist", lookConflist},
	{"programs", ofLoaded(lookPrograms)},
	{"uplinks", ofLoaded(lookUplinks)},
	{"forwarding", lookForwarding},
	{"firewall", lookFirewall},
	{"rp-filter", lookRPFilter},
	{"mtu", lookMTU},
	{"containers", ofLoaded(lookContainers)},
	{"reservations", lookReservations},
	{"unassigned", ofLoaded(lookUnassigned)},
	{"nodes", ofLoaded(lookNodes)},
	{checkPeers, ofLoaded(lookPeers)},
}

// checkPeers sends packets to other nodes, if Options say so.
const checkPeers = "peers"

// ofLoaded is a check of what is loaded, if anything is.
func ofLoaded(look func(context.Context, *host) ([]Finding, error)) func(context.Context, *host) ([]Finding, error) {
	return func(ctx context.Context, h *host) ([]Finding, error) {
		if err := h.whyNotOpen(); err != nil {
			return nil, err
		}
		return look(ctx, h)
	}
}

// patience is how long each check and each fix may wait for locks and for tools: one that gets none costs no other.
var patience = 20 * time.Second

// Options say where to look.
type Options struct {
	runtimes.Options
	DataDir  string // of the records; "": the default
	CacheDir string // libcni's
	Peers    bool   // probe other nodes
}

// Run runs all checks. It changes nothing.
func Run(ctx context.Context, options Options) (findings []Finding) {
	h, err := newHost(options)
	if err != nil {
		return []Finding{{Check: "host", State: Unknown, What: err.Error()}}
	}
	defer h.close()
	for _, c := range checks {
		found, err := c.lookInTime(ctx, h)
		if err != nil {
			found = append(found, Finding{State: Unknown, What: "the check could not look: " + strings.ReplaceAll(err.Error(), "\n", "; ")})
		}
		for _, f := range found {
			f.Check = c.name
			findings = append(findings, f)
		}
	}
	return findings
}

func (c check) lookInTime(ctx context.Context, h *host) ([]Finding, error) {
	timeout := patience
	if c.name == checkPeers {
		timeout = 3 * patience // a cluster may have thousands of nodes
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.look(ctx, h)
}

// Fix fixes what findings say can be fixed safely, and returns what it did and the findings afterwards.
func Fix(ctx context.Context, options Options, findings []Finding) ([]Finding, error) {
	var done []Finding
	var errs []error
	for _, f := range fixes {
		i := slices.IndexFunc(findings, func(found Finding) bool { return found.fix == f && found.State != Good })
		if i < 0 {
			continue
		}
		did, err := f.inTime(ctx, options)
		if err != nil {
			errs = append(errs, fmt.Errorf("fix %s: %w", findings[i].Check, err))
		}
		for _, what := range did {
			done = append(done, Finding{Check: findings[i].Check, State: Fixed, What: what})
		}
	}
	if len(done)+len(errs) == 0 {
		return findings, nil
	}
	return append(done, Run(ctx, options)...), errors.Join(errs...)
}

// fix is safe to do while containers run, because it restores what ADD has made or removes what no container uses. It
// returns what it did.
type fix func(context.Context, *host) (did []string, err error)

var (
	fixByRepair fix = repair
	fixOrphans  fix = removeOrphans

	// fixes are all of them, in their order.
	fixes = []*fix{&fixByRepair, &fixOrphans}
)

func (f fix) inTime(ctx context.Context, options Options) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	h, err := newHost(options)
	if err != nil {
		return nil, err
	}
	defer h.close()
	return f(ctx, h)
}

// repair does what ebpfnetctl repair does.
func repair(ctx context.Context, h *host) ([]string, error) {
	if h.admin == nil {
		return nil, h.errAttached
	}
	repaired, err := h.admin.Repair(ctx)
	for i := range repaired {
		repaired[i] = "repaired " + repaired[i]
	}
	return repaired, err
}

func good(format string, args ...any) Finding {
	return Finding{State: Good, What: fmt.Sprintf(format, args...)}
}

// warning is something that does harm in some cases.
func warning(remedy, format string, args ...any) Finding {
	return Finding{State: Warning, What: fmt.Sprintf(format, args...), Remedy: remedy}
}

func wrong(remedy, format string, args ...any) Finding {
	return Finding{State: Wrong, What: fmt.Sprintf(format, args...), Remedy: remedy}
}

// by returns a finding that a fix ends.
func (f Finding) by(fix *fix) Finding {
	f.fix = fix
	return f
}

// orGood returns the findings, or a good one if there are none.
func orGood(findings []Finding, format string, args ...any) []Finding {
	if len(findings) > 0 {
		return findings
	}
	return []Finding{good(format, args...)}
}

// word quotes a name for a shell, where one could misread it: who reads a remedy may copy it.
func word(name string) string {
	if output.IsWord(name) {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}

// list joins words for a sentence, and leaves out what would be too many.
func list(words []string) string {
	const limit = 5

	if len(words) > limit {
		return fmt.Sprintf("%s and %d more", strings.Join(words[:limit], ", "), len(words)-limit)
	}
	return strings.Join(words, ", ")
}
