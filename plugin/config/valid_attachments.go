package config

import (
	"bytes"
	"encoding/json"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// ValidAttachments are the attachments of one network that GC keeps.
type ValidAttachments struct {
	Network    string
	owners     map[loader.Owner]bool
	containers map[string]bool
}

// NewValidAttachments returns a set of attachments of one network.
func NewValidAttachments(network string, attachments []maps.Attachment) *ValidAttachments {
	v := &ValidAttachments{Network: network, owners: map[loader.Owner]bool{}, containers: map[string]bool{}}
	v.Add(attachments...)
	return v
}

// Add adds attachments of the network.
func (v *ValidAttachments) Add(attachments ...maps.Attachment) {
	for _, a := range attachments {
		v.owners[maps.Attachment{Network: v.Network, ContainerID: a.ContainerID, IfName: a.IfName}.Owner()] = true
		v.containers[a.ContainerID] = true
	}
}

// AddOwner adds an attachment with only its owner.
func (v *ValidAttachments) AddOwner(owner loader.Owner) { v.owners[owner] = true }

// HasOwner reports whether an owner's attachment is valid.
func (v *ValidAttachments) HasOwner(owner loader.Owner) bool { return v.owners[owner] }

// IsEmpty reports whether no attachment is valid.
func (v *ValidAttachments) IsEmpty() bool { return len(v.owners) == 0 }

// Lacks reports whether an attachment belongs to this network and is not valid.
func (v *ValidAttachments) Lacks(a maps.Attachment) bool {
	return a.Network == v.Network && !v.owners[a.Owner()]
}

// HasReservation reports whether a reservation is that of a valid attachment. A reservation of an
// old host-local names no interface and is found by its container.
func (v *ValidAttachments) HasReservation(a ipam.Attachment) bool {
	if a.IfName == "" {
		return v.containers[a.ContainerID]
	}
	return v.owners[maps.Attachment{Network: v.Network, ContainerID: a.ContainerID, IfName: a.IfName}.Owner()]
}

// ParseValidAttachments returns the attachments that the runtime lists as valid. It returns nil
// where the runtime lists none at all, by a key that is absent or null; an empty list says that no
// attachment is valid.
func (c *Call) ParseValidAttachments() (*ValidAttachments, error) {
	var listed []maps.Attachment
	isListed := false
	for _, key := range []string{"cni.dev/valid-attachments", "cni.dev/attachments"} { // the latter as in the text of 1.1.0
		list := c.keys[key]
		if len(list) == 0 || bytes.Equal(list, []byte("null")) {
			continue
		}
		var attachments []struct {
			ContainerID string `json:"containerID"`
			IfName      string `json:"ifname"`
		}
		if err := json.Unmarshal(list, &attachments); err != nil {
			return nil, cnierr.Invalid(key, list, `a list of {"containerID": "...", "ifname": "..."}`)
		}
		isListed = true
		for _, a := range attachments {
			listed = append(listed, maps.Attachment{ContainerID: a.ContainerID, IfName: a.IfName})
		}
	}
	if !isListed {
		return nil, nil
	}
	return NewValidAttachments(c.Network(), listed), nil
}
