package plugin

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// ErrNoAttachment says that there is no container of that name.
var ErrNoAttachment = errors.New("no such container")

// ParseSettings reads KEY=VALUE pairs with keys of the configuration.
func ParseSettings(pairs []string) (s record.Settings, err error) {
	for _, pair := range pairs {
		key, value, _ := strings.Cut(pair, "=")
		switch key {
		case "antiSpoof":
			on, err := strconv.ParseBool(value)
			if err != nil {
				return s, invalid(key, value, "true or false")
			}
			s.AntiSpoof = &on
		case "ingressPolicy":
			policy, err := parsePolicy(value)
			if err != nil {
				return s, err
			}
			s.IngressPolicy = policy.String()
		default:
			return s, fmt.Errorf("%q: expected KEY=VALUE with one of antiSpoof, ingressPolicy", pair)
		}
	}
	return s, nil
}

// change makes the configuration what it is with settings.
func (c *Config) change(s record.Settings) (err error) {
	if s.AntiSpoof != nil {
		c.AntiSpoof = *s.AntiSpoof
	}
	if s.IngressPolicy != "" {
		c.Ingress, err = parsePolicy(s.IngressPolicy)
	}
	return err
}

// merge returns the settings with later ones.
func merge(s, later record.Settings) record.Settings {
	if later.AntiSpoof != nil {
		s.AntiSpoof = later.AntiSpoof
	}
	if later.IngressPolicy != "" {
		s.IngressPolicy = later.IngressPolicy
	}
	return s
}

// Set changes settings of containers that run: of all in a network, or of those with the
// container's id and interface as far as these are not "". CHECK then expects what was set, and DEL
// forgets it. It returns the attachments in words; the error wraps ErrNoAttachment where there are none.
func (h *Host) Set(ctx context.Context, of maps.Attachment, s record.Settings) (changed []string, err error) {
	err = maps.With(ctx, h.datapath, func(store *maps.Store) error {
		devices, err := maps.Devices(h.datapath)
		if err != nil {
			return err
		}
		for _, device := range devices {
			kept, err := h.recordOf(device)
			if err != nil {
				return err
			}
			if kept == nil || !isOf(kept.Attachment, of) {
				continue
			}
			if err := h.set(store, device, kept, s); err != nil {
				return err
			}
			changed = append(changed, aliasOf(kept.Attachment))
		}
		return nil
	})
	if err == nil && len(changed) == 0 {
		err = fmt.Errorf("%w: %s", ErrNoAttachment, strings.TrimRight(of.Network+"/"+of.ContainerID+"/"+of.IfName, "/"))
	}
	return changed, err
}

func isOf(at, of maps.Attachment) bool {
	return at.Network == of.Network && (of.ContainerID == "" || at.ContainerID == of.ContainerID) &&
		(of.IfName == "" || at.IfName == of.IfName)
}

// recordOf returns the record of a device's attachment, a new one where there is none, and nil
// where the device is gone.
func (h *Host) recordOf(device maps.Device) (*record.Record, error) {
	kept, err := h.records.Read(device.Owner)
	if err != nil || kept != nil {
		return kept, err
	}
	end, err := link.Device(h.netlink, device.IfIndex)
	if err != nil || end == nil {
		return nil, err
	}
	at, ours := attachmentOf(end)
	if !ours || at.Owner() != device.Owner {
		return nil, nil
	}
	return &record.Record{Attachment: at}, nil
}

func (h *Host) set(store *maps.Store, device maps.Device, kept *record.Record, s record.Settings) error {
	kept.Settings = merge(kept.Settings, s)
	if err := h.records.Write(kept); err != nil {
		return err
	}
	config := Config{AntiSpoof: device.AntiSpoof, Ingress: device.Ingress}
	if err := config.change(s); err != nil {
		return err
	}
	device.AntiSpoof, device.Ingress = config.AntiSpoof, config.Ingress
	return store.PutDevice(device)
}
