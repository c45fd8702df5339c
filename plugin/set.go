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
		if err := parseSetting(&s, key, value); err != nil {
			return s, err
		}
	}
	return s, nil
}

func parseSetting(s *record.Settings, key, value string) error {
	numbers := map[string]struct {
		field **uint64
		check func(string, int64) (uint64, error)
	}{
		"ingressRate": {&s.IngressRate, parseRate}, "ingressBurst": {&s.IngressBurst, parseBurst},
		"egressRate": {&s.EgressRate, parseRate}, "egressBurst": {&s.EgressBurst, parseBurst},
	}
	if number, known := numbers[key]; known {
		parsed, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return invalid(key, value, "a number")
		}
		checked, err := number.check(key, parsed)
		*number.field = &checked
		return err
	}
	switch key {
	case "antiSpoof":
		on, err := strconv.ParseBool(value)
		if err != nil {
			return invalid(key, value, "true or false")
		}
		s.AntiSpoof = &on
		return nil
	case "ingressPolicy":
		policy, err := parsePolicy(value)
		s.IngressPolicy = policy.String()
		return err
	default:
		return unsupported(key, value, "what can be set is antiSpoof, ingressPolicy, ingressRate, ingressBurst, egressRate and egressBurst")
	}
}

// change makes the configuration what it is with settings.
func (c *Config) change(s record.Settings) (err error) {
	if s.AntiSpoof != nil {
		c.AntiSpoof = *s.AntiSpoof
	}
	if s.IngressPolicy != "" {
		c.Ingress, err = parsePolicy(s.IngressPolicy)
	}
	c.Bandwidth = c.Bandwidth.With(s.Limits)
	return err
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

// set writes down first what it changes, so that CHECK knows it for sure.
func (h *Host) set(store *maps.Store, device maps.Device, kept *record.Record, s record.Settings) error {
	kept.Settings.Merge(s)
	if err := h.records.Write(kept); err != nil {
		return err
	}
	config := Config{AntiSpoof: device.AntiSpoof, Ingress: device.IngressPolicy, Bandwidth: kept.Bandwidth}
	if err := config.change(kept.Settings); err != nil {
		return err
	}
	device.AntiSpoof, device.IngressPolicy, device.Shaped = config.AntiSpoof, config.Ingress, config.Bandwidth.Ingress.Rate != 0
	if err := store.PutDevice(device); err != nil {
		return err
	}
	if s.Limits == (record.Limits{}) {
		return nil
	}
	return h.setBandwidth(device.IfIndex, kept.Attachment.IfName, config.Bandwidth)
}
