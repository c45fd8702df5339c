package nodestate

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
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
	policies := &Policies{}
	if exists, err := readJSON(PoliciesOf(path), maxSize, policies); err != nil || !exists {
		return nil, err
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
