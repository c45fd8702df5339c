package nodestate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Policies says which pods start without rules, while the agent enforces NetworkPolicy.
type Policies struct {
	Namespaces []string  `json:"namespaces"` // those with policies
	Until      time.Time `json:"until"`      // afterwards, any other namespace may have got one, too
}

// ErrNoPolicy is wrapped by the error for a pod whose policies the agent has not written.
var ErrNoPolicy = errors.New("the node agent has not written the pod's NetworkPolicies")

// PoliciesOf returns the path of the policies of the agent whose state is at path.
func PoliciesOf(path string) string { return filepath.Join(filepath.Dir(path), "policies.json") }

// IsOpen reports whether no policy applies to pods of a namespace.
func (p *Policies) IsOpen(namespace string, now time.Time) bool {
	return p == nil || now.Before(p.Until) && !slices.Contains(p.Namespaces, namespace)
}

// ReadPolicies reads the policies of the agent whose state is at path. Without a file it returns nil: the agent
// enforces none.
func ReadPolicies(path string) (*Policies, error) {
	const maxSize = 1 << 24 // bytes: a namespace has at most 66

	file, err := os.Open(PoliciesOf(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, maxSize))
	policies := &Policies{}
	if err == nil {
		err = json.Unmarshal(content, policies)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", show.Value(PoliciesOf(path)), err)
	}
	return policies, nil
}

// WritePolicies replaces the policies.
func WritePolicies(path string, policies Policies) error {
	return replaceJSON(PoliciesOf(path), policies)
}

// RemovePolicies says that the agent enforces no policies.
func RemovePolicies(path string) error {
	if err := os.Remove(PoliciesOf(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// RuleNames has the objects that the rules of pods come from, such as "shop/web ingress[2]".
type RuleNames struct {
	Lists [][]string        `json:"lists"` // the name of rule number 1 comes first
	Pods  map[string][2]int `json:"pods"`  // by the policy's owner: the lists for ingress and egress
}

// RuleNamesOf returns the path of the names of the agent whose state is at path.
func RuleNamesOf(path string) string { return filepath.Join(filepath.Dir(path), "rules.json") }

// WriteRuleNames replaces the names.
func WriteRuleNames(path string, names RuleNames) error { return replaceJSON(RuleNamesOf(path), names) }
