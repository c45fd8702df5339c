package nodestate

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Policies says which pods start without rules, while the agent enforces NetworkPolicy.
type Policies struct {
	Namespaces []string  `json:"namespaces"` // those with policies
	Until      time.Time `json:"until"`      // afterwards, any other namespace may have got one, too
	Written    time.Time `json:"written"`    // when the agent last said so; it repeats that each minute
}

// Silence is the time after which an agent that repeats nothing does not run, or fails.
const Silence = 3 * time.Minute

// ErrNoPolicy is wrapped by the error for pods whose policies the agent has not written.
var ErrNoPolicy = errors.New("the node agent has not written the pod's NetworkPolicies")

// PoliciesOf returns the path of the policies of the agent whose state is at path.
func PoliciesOf(path string) string { return filepath.Join(filepath.Dir(path), "policies.json") }

// IsOpen reports whether no policy applies to pods of a namespace.
func (p *Policies) IsOpen(namespace string, now time.Time) bool {
	return p == nil || now.Before(p.Until) && !slices.Contains(p.Namespaces, namespace)
}

// CheckPolicies returns an error if pods of all namespaces wait, because the agent whose state is at path does not run.
func CheckPolicies(path string, now time.Time) error {
	policies, err := ReadPolicies(path)
	if err != nil || policies == nil || now.Before(policies.Until) || now.Before(policies.Written.Add(Silence)) {
		return err
	}
	return fmt.Errorf("%w since %s, and all new pods wait for theirs: is its pod of this node running?",
		ErrNoPolicy, policies.Written.Format(time.RFC3339))
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

// SocketOf returns the path of the socket by which root asks the agent whose state is at path.
func SocketOf(path string) string { return filepath.Join(filepath.Dir(path), "agent.sock") }

// PreviewPath is the path of a URL, to which a Preview is posted.
const PreviewPath = "/preview"

// Preview asks which connections of this node's pods policies would turn.
type Preview struct {
	Objects     string       `json:"objects"` // YAML or JSON. Those that exist would be replaced
	Deleted     []string     `json:"deleted"` // such as shop/web, or no-mail for a ClusterNetworkPolicy. They must exist
	Connections []Connection `json:"connections"`
}

// Connection is one direction of a pod.
type Connection struct {
	Pod      netip.Addr `json:"pod"`
	IsEgress bool       `json:"isEgress"`
	Peer     netip.Addr `json:"peer"` // not the own node
	Protocol uint8      `json:"protocol"`
	Port     uint16     `json:"port"` // the destination's
}

// Previewed is the answer.
type Previewed struct {
	Turns    []Turn   `json:"turns"`
	Warnings []string `json:"warnings"` // about the objects
}

// Turn is a connection whose verdict would change.
type Turn struct {
	Connection int    `json:"connection"` // its place in Preview.Connections
	Pod        string `json:"pod"`        // such as shop/web-0
	Admits     bool   `json:"admits"`     // then
	Why        string `json:"why"`
}
