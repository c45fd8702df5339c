package nodestate

import (
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/ebpfnet/ebpfnet/maps"
)

// Rules has the objects that the rules of pods come from, and what they admit in the objects' words.
type Rules struct {
	Rules   []ObjectRule          `json:"rules"`
	Lists   []RuleList            `json:"lists"`
	Pods    map[string]PodRules   `json:"pods"`    // by the policy's owner
	Classes map[uint32][]Selector `json:"classes"` // those of rules that match the pods of a class
}

// PodRules is a pod.
type PodRules struct {
	Name  string `json:"name"`  // such as shop/web-0
	Lists [2]int `json:"lists"` // for ingress and egress: the places in Rules.Lists
}

// RuleList is one direction of pods.
type RuleList struct {
	Policies []string    `json:"policies"`         // that isolate it, such as shop/web
	Rules    []int       `json:"rules"`            // by their numbers, from 1: the places in Rules.Rules
	Denied   []maps.Rule `json:"denied,omitempty"` // what rules deny: RuleSet.Denied
}

// ObjectRule is a rule of an object.
type ObjectRule struct {
	Name   string     `json:"name"`             // such as shop/web ingress[2]
	Action string     `json:"action,omitempty"` // deny or pass; "": what it matches is admitted
	Any    bool       `json:"any,omitempty"`    // any peer
	Pods   []Selector `json:"pods,omitempty"`   // or those that a selector matches
	Blocks []Block    `json:"blocks,omitempty"`
}

// Block is a CIDR without exceptions.
type Block struct {
	CIDR   netip.Prefix   `json:"cidr"`
	Except []netip.Prefix `json:"except,omitempty"`
}

// Contains reports whether the block has an address.
func (b Block) Contains(addr netip.Addr) bool {
	return b.CIDR.Contains(addr) && !slices.ContainsFunc(b.Except, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// Selector selects pods.
type Selector struct {
	Namespace  string `json:"namespace,omitempty"`  // the only one; "": those that Namespaces selects
	Namespaces string `json:"namespaces,omitempty"` // by their labels, such as team=two; "": all
	Labels     string `json:"labels,omitempty"`     // of pods; "": any
}

// String returns the selector in words.
func (s Selector) String() string {
	pods := "pods"
	if s.Labels != "" {
		pods = fmt.Sprintf("pods (%s)", s.Labels)
	}
	switch {
	case s.Namespace != "":
		return pods + " of namespace " + s.Namespace
	case s.Namespaces != "":
		return fmt.Sprintf("%s of namespaces (%s)", pods, s.Namespaces)
	}
	return pods + " of all namespaces"
}

// Of returns what one direction of an owner's policy comes from: which policies isolate it, and its rules by their
// numbers, from 1. Without the file's knowledge, both are nil.
func (r *Rules) Of(owner string, isEgress bool) (policies []string, rules []ObjectRule) {
	list := r.list(owner, isEgress)
	for _, i := range list.Rules {
		rule := ObjectRule{Name: fmt.Sprint("rule ", i)}
		if i >= 0 && i < len(r.Rules) {
			rule = r.Rules[i]
		}
		rules = append(rules, rule)
	}
	return list.Policies, rules
}

// Denied returns what rules of an owner's policy deny in one direction.
func (r *Rules) Denied(owner string, isEgress bool) []maps.Rule {
	return r.list(owner, isEgress).Denied
}

func (r *Rules) list(owner string, isEgress bool) RuleList {
	pod, ok := r.Pods[owner]
	at := pod.Lists[0]
	if isEgress {
		at = pod.Lists[1]
	}
	if !ok || at < 0 || at >= len(r.Lists) {
		return RuleList{}
	}
	return r.Lists[at]
}

// RulesOf returns the path of the rules of the agent whose state is at path.
func RulesOf(path string) string { return filepath.Join(filepath.Dir(path), "rules.json") }

// RulesFile keeps the rules in a file until it is replaced.
type RulesFile struct {
	rules Rules
	read  fs.FileInfo
}

// Read reads the rules of the agent whose state is at path. Without a file there are none.
func (f *RulesFile) Read(path string) (*Rules, error) {
	const maxSize = 1 << 27 // bytes; 500 policies with 100 rules have 10 MB

	now, err := os.Stat(RulesOf(path))
	if err == nil && f.read != nil && os.SameFile(now, f.read) && now.ModTime().Equal(f.read.ModTime()) {
		return &f.rules, nil
	}
	f.rules, f.read = Rules{}, nil
	if _, err = readJSON(RulesOf(path), maxSize, &f.rules); err == nil {
		f.read = now // nil without a file
	}
	return &f.rules, err
}

// WriteRules replaces the rules.
func WriteRules(path string, rules Rules) error { return replaceJSON(RulesOf(path), rules) }
