package nodestate

import (
	"net/netip"
	"path/filepath"
)

// SocketOf returns the path of the socket by which root asks the agent whose state is at path.
func SocketOf(path string) string { return filepath.Join(filepath.Dir(path), "agent.sock") }

// PreviewPath is the path of a URL, to which a Preview is posted.
const PreviewPath = "/preview"

// Preview asks which connections of this node's pods NetworkPolicies would turn.
type Preview struct {
	Objects     string       `json:"objects"` // YAML or JSON. Those that exist would be replaced
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
