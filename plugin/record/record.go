// Package record keeps on disk what neither the kernel nor the datapath knows about an attachment:
// names that do not fit into a device's alias, what the runtime said about the container, the
// interface that a chained ebpfnet works on, what ebpfnet changed there, and who else cleans up. Each
// attachment has at most one file, named by its owner.
//
// Records describe state of the kernel, so they belong on a file system that a reboot empties.
package record

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

// DefaultDir is the dataDir of a configuration that names none.
const DefaultDir = "/run/ebpfnet"

// IndexDir returns the directory, below dataDir, where package ipam keeps its indexes of reservations.
func IndexDir(dataDir string) string { return filepath.Join(dataDir, "addresses") }

// Record describes one attachment.
type Record struct {
	Attachment maps.Attachment `json:"attachment"`
	Chained    *Chained        `json:"chained,omitempty"`
	Aliases    []string        `json:"aliases,omitempty"`
	CgroupPath string          `json:"cgroupPath,omitempty"`
	Labels     []Label         `json:"labels,omitempty"`
	Uplinks    []string        `json:"uplinks,omitempty"`  // name patterns; empty: chosen by routes and kinds
	Bandwidth  link.Bandwidth  `json:"bandwidth,omitzero"` // of the configuration at ADD
	Settings   Settings        `json:"settings,omitzero"`

	// Others are the plugins that made a container which ebpfnetctl migrate has adopted, in the order of DEL.
	Others []OtherPlugin `json:"others,omitempty"`
}

// OtherPlugin is the DEL of a plugin that the runtime does not call, because the network's list does not
// name it.
type OtherPlugin struct {
	Type   string          `json:"type"`
	Config json.RawMessage `json:"config"` // as on its stdin
}

// Settings are keys of the configuration that an operator changed while the container runs. nil
// and "" leave the configuration's value.
type Settings struct {
	AntiSpoof     *bool  `json:"antiSpoof,omitempty"`
	IngressPolicy string `json:"ingressPolicy,omitempty"`
	Policy        string `json:"policy,omitempty"` // as JSON, or "none"
	PolicyMode    string `json:"policyMode,omitempty"`
	Limits
}

// Merge overwrites s with what later settings set.
func (s *Settings) Merge(later Settings) {
	s.AntiSpoof = cmp.Or(later.AntiSpoof, s.AntiSpoof)
	s.IngressPolicy = cmp.Or(later.IngressPolicy, s.IngressPolicy)
	s.Policy = cmp.Or(later.Policy, s.Policy)
	s.PolicyMode = cmp.Or(later.PolicyMode, s.PolicyMode)
	s.IngressRate = cmp.Or(later.IngressRate, s.IngressRate)
	s.IngressBurst = cmp.Or(later.IngressBurst, s.IngressBurst)
	s.EgressRate = cmp.Or(later.EgressRate, s.EgressRate)
	s.EgressBurst = cmp.Or(later.EgressBurst, s.EgressBurst)
}

// Limits are the keys of a link.Bandwidth, in bits per second and bits. nil leaves a key as it is.
type Limits struct {
	IngressRate  *uint64 `json:"ingressRate,omitempty"`
	IngressBurst *uint64 `json:"ingressBurst,omitempty"`
	EgressRate   *uint64 `json:"egressRate,omitempty"`
	EgressBurst  *uint64 `json:"egressBurst,omitempty"`
}

// Apply returns a bandwidth with these keys changed.
func (l Limits) Apply(b link.Bandwidth) link.Bandwidth {
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

// Label is one of args.cni.labels.
type Label struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// Chained describes the interface of another plugin that ebpfnet works on.
type Chained struct {
	HostIndex int         `json:"hostIndex"`       // of the host's end of the veth
	Before    link.Tuning `json:"before,omitzero"` // the values before ebpfnet changed them
}

// ChainedIndex returns the ifindex of the device of another plugin that ebpfnet works on, or 0 where the device is ours
// or there is no record.
func (r *Record) ChainedIndex() int {
	if r == nil || r.Chained == nil {
		return 0
	}
	return r.Chained.HostIndex
}

// IsEmpty reports whether there is nothing to keep.
func (r *Record) IsEmpty() bool {
	return names.Fit(r.Attachment) && r.Chained == nil && len(r.Aliases) == 0 && r.CgroupPath == "" && len(r.Labels) == 0 && len(r.Uplinks) == 0 &&
		len(r.Others) == 0 && r.Bandwidth.IsEmpty() && r.Settings == Settings{}
}

// SameInput reports whether two records have the same input of runtimes and configurations.
func (r *Record) SameInput(other *Record) bool {
	return slices.Equal(r.Aliases, other.Aliases) && r.CgroupPath == other.CgroupPath &&
		slices.Equal(r.Labels, other.Labels) && slices.Equal(r.Uplinks, other.Uplinks)
}

// Dir holds the records of one host network namespace.
type Dir struct {
	path string
}

// Open returns the records, below root, of the calling thread's network namespace.
func Open(root string) (Dir, error) {
	netns, err := loader.NetnsName()
	return Dir{filepath.Join(root, netns)}, err
}

// Write writes a record. Other processes see all of it or nothing.
func (d Dir) Write(r *Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return fmt.Errorf("create the directory of records: %w", err)
	}
	owner := r.Attachment.Owner()
	if err := os.WriteFile(d.partial(owner), text, 0o600); err != nil {
		return errors.Join(fmt.Errorf("write a record: %w", err), remove(d.partial(owner)))
	}
	if err := os.Rename(d.partial(owner), d.file(owner)); err != nil {
		return errors.Join(fmt.Errorf("write a record: %w", err), remove(d.partial(owner)))
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

// Remove removes an owner's record, and the partial one of a Write that was killed. A missing
// record is no error.
func (d Dir) Remove(owner loader.Owner) error {
	return errors.Join(remove(d.file(owner)), remove(d.partial(owner)))
}

func remove(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a record: %w", err)
	}
	return nil
}

// List returns all records. It skips unreadable ones and reports them in the error.
func (d Dir) List() ([]*Record, error) {
	files, err := os.ReadDir(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var all []*Record
	errs := []error{err}
	for _, file := range files {
		var owner loader.Owner
		name, isRecord := strings.CutSuffix(file.Name(), suffix)
		if _, err := fmt.Sscanf(name, "%x", &owner); !isRecord || err != nil {
			continue // not ours
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
	return filepath.Join(d.path, owner.String()+suffix)
}

// partial names a record that is being written.
func (d Dir) partial(owner loader.Owner) string { return d.file(owner) + ".partial" }
