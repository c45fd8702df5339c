// Package record keeps what neither the kernel nor the datapath can tell of an
// attachment: what a runtime said about the container, what a chained ebpfnet
// attached itself to, and what it changed. One file each, by owner, and none for
// an attachment that has nothing to keep.
//
// Records live as long as the kernel's state does, so they belong on a file
// system that a reboot empties.
package record

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// DefaultDir is where records are if the configuration says nothing else.
const DefaultDir = "/run/ebpfnet"

// Record is what is kept of one attachment.
type Record struct {
	Attachment maps.Attachment `json:"attachment"`
	Chained    *Chained        `json:"chained,omitempty"`
	Aliases    []string        `json:"aliases,omitempty"`
	CgroupPath string          `json:"cgroupPath,omitempty"`
	Labels     []Label         `json:"labels,omitempty"`
	Uplinks    []string        `json:"uplinks,omitempty"`  // names, where the network has any
	Bandwidth  Bandwidth       `json:"bandwidth,omitzero"` // as ADD had it
	Settings   Settings        `json:"settings,omitzero"`
}

// Settings are keys of the configuration that were changed while the container ran;
// nil and "": as the configuration has them.
type Settings struct {
	AntiSpoof     *bool  `json:"antiSpoof,omitempty"`
	IngressPolicy string `json:"ingressPolicy,omitempty"`
	Limits
}

// Merge takes over what later settings say.
func (s *Settings) Merge(later Settings) {
	s.AntiSpoof = cmp.Or(later.AntiSpoof, s.AntiSpoof)
	s.IngressPolicy = cmp.Or(later.IngressPolicy, s.IngressPolicy)
	s.IngressRate = cmp.Or(later.IngressRate, s.IngressRate)
	s.IngressBurst = cmp.Or(later.IngressBurst, s.IngressBurst)
	s.EgressRate = cmp.Or(later.EgressRate, s.EgressRate)
	s.EgressBurst = cmp.Or(later.EgressBurst, s.EgressBurst)
}

// Limits are the keys of a Bandwidth, in bits per second and bits.
type Limits struct {
	IngressRate  *uint64 `json:"ingressRate,omitempty"`
	IngressBurst *uint64 `json:"ingressBurst,omitempty"`
	EgressRate   *uint64 `json:"egressRate,omitempty"`
	EgressBurst  *uint64 `json:"egressBurst,omitempty"`
}

// With returns the bandwidth with some keys changed.
func (b Bandwidth) With(l Limits) Bandwidth {
	for key, changed := range map[*uint64]*uint64{
		&b.Ingress.Rate: l.IngressRate, &b.Ingress.Burst: l.IngressBurst,
		&b.Egress.Rate: l.EgressRate, &b.Egress.Burst: l.EgressBurst,
	} {
		if changed != nil {
			*key = *changed
		}
	}
	return b
}

// Bandwidth is what a container's traffic is held to: ingress is what it is sent, egress what it
// sends. The traffic of peers in some networks may not count.
type Bandwidth struct {
	Ingress  link.Limit     `json:"ingress,omitzero"`
	Egress   link.Limit     `json:"egress,omitzero"`
	Unshaped []netip.Prefix `json:"unshaped,omitempty"`
}

// IsEmpty says that there is no limit.
func (b Bandwidth) IsEmpty() bool { return b.Ingress.Rate == 0 && b.Egress.Rate == 0 }

// IsZero is for the JSON of a record.
func (b Bandwidth) IsZero() bool { return b.IsEmpty() }

// Label is one of args.cni.labels.
type Label struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// Chained is what an ebpfnet that came after another plugin worked on.
type Chained struct {
	HostIndex int         `json:"hostIndex"`       // of the host's end of the veth
	Before    link.Tuning `json:"before,omitzero"` // what stood where it set something
}

// IsEmpty says that there is nothing to keep.
func (r *Record) IsEmpty() bool {
	return r.Chained == nil && len(r.Aliases) == 0 && r.CgroupPath == "" && len(r.Labels) == 0 && len(r.Uplinks) == 0 &&
		r.Bandwidth.IsEmpty() && r.Settings == Settings{}
}

// SaysAs compares what runtimes and configurations said.
func (r *Record) SaysAs(other *Record) bool {
	return slices.Equal(r.Aliases, other.Aliases) && r.CgroupPath == other.CgroupPath &&
		slices.Equal(r.Labels, other.Labels) && slices.Equal(r.Uplinks, other.Uplinks)
}

// Dir is the records of one host network namespace.
type Dir struct {
	path string
}

// Open returns the records below root of the calling thread's network namespace.
func Open(root string) (Dir, error) {
	here, err := loader.NetnsName()
	return Dir{filepath.Join(root, here)}, err
}

// Write keeps a record, which other processes see as a whole or not at all.
func (d Dir) Write(r *Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return fmt.Errorf("make the directory of records: %w", err)
	}
	owner := r.Attachment.Owner()
	if err := os.WriteFile(d.half(owner), text, 0o600); err != nil {
		return errors.Join(fmt.Errorf("write a record: %w", err), d.Remove(owner))
	}
	if err := os.Rename(d.half(owner), d.file(owner)); err != nil {
		return errors.Join(fmt.Errorf("write a record: %w", err), d.Remove(owner))
	}
	return nil
}

// Read returns an owner's record, or nil where it has none.
func (d Dir) Read(owner loader.Owner) (*Record, error) {
	text, err := os.ReadFile(d.file(owner))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read a record: %w", err)
	}
	r := &Record{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("read record %s: %w", d.file(owner), err)
	}
	return r, nil
}

// Remove removes an owner's record, and what a Write has left that was killed. It is
// no error that there is none.
func (d Dir) Remove(owner loader.Owner) error {
	var errs []error
	for _, file := range []string{d.file(owner), d.half(owner)} {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove a record: %w", err))
		}
	}
	return errors.Join(errs...)
}

// List returns all records. One that cannot be read is left out, and in the error.
func (d Dir) List() ([]*Record, error) {
	files, err := filepath.Glob(filepath.Join(d.path, "*"+suffix))
	var all []*Record
	errs := []error{err}
	for _, file := range files {
		var owner loader.Owner
		if _, err := fmt.Sscanf(strings.TrimSuffix(filepath.Base(file), suffix), "%x", &owner); err != nil {
			continue // somebody else's
		}
		r, err := d.Read(owner)
		if err != nil || r == nil {
			errs = append(errs, err)
			continue
		}
		all = append(all, r)
	}
	return all, errors.Join(errs...)
}

const suffix = ".json"

func (d Dir) file(owner loader.Owner) string {
	return filepath.Join(d.path, fmt.Sprintf("%016x%s", uint64(owner), suffix))
}

// half is a record that is being written.
func (d Dir) half(owner loader.Owner) string { return d.file(owner) + ".half" }
