package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
)

// status is what `ebpfnetctl status -o json` prints: schema/status.json.
type status struct {
	Directory string           `json:"directory"`
	Revision  uint32           `json:"revision"` // of the programs
	Build     loader.BuildID   `json:"build"`
	Same      bool             `json:"sameAsThisBinary"`
	Ports     [][2]int         `json:"masqueradePorts"` // the first and the last of each range
	Uplinks   []string         `json:"uplinks"`
	Connected int              `json:"connected"` // containers
	Dead      int              `json:"dead"`      // containers without their device
	Auto      []admin.AutoPath `json:"fastPathAuto"`
	Services  bool             `json:"servicesOnFastPath"` // connections that the host's rules translate, once they are established
	Warnings  []string         `json:"warnings"`           // about the host
	Detached  []string         `json:"detached"`           // devices that lack programs
	Maps      []admin.MapUse   `json:"maps"`
	Bytes     uint64           `json:"bytes"` // of all maps
	FlowsUse  float64          `json:"flowTableUsed"`
	Drops     []drops.Count    `json:"drops"`

	services string
}

func newStatus() *cobra.Command {
	var flags output.Flags
	var dataDir string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "whether ebpfnet is healthy, and what it drops",
		Long: `Prints whether ebpfnet is healthy on this host: its programs, uplinks and
containers, warnings, and why packets were dropped. -o wide adds the pins, the
ports for masquerading, how full the table of flows is, and the maps with their
memory.`,
		Example: "  ebpfnetctl status\n  ebpfnetctl status -o json | jq -e .sameAsThisBinary",
		Args:    noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printStatus(output.New(cmd.OutOrStdout(), flags), dataDir)
		},
	}
	flags.AddToRead(cmd.Flags())
	addDataDir(cmd, &dataDir)
	return cmd
}

func printStatus(p *output.Printer, dataDir string) error {
	totals, err := admin.ReadTotals(admin.TotalsOptions{DataDir: dataDir, AllMaps: true})
	if err != nil {
		return err
	}
	s := &status{
		Directory: totals.Pins,
		Revision:  totals.Config.Revision,
		Build:     loader.BuildID(totals.Config.Build),
		Same:      totals.Config.Build == bpf.Build,
		Uplinks:   append([]string{}, totals.Uplinks...), // not null
		Warnings:  append([]string{}, totals.Warnings...),
		Detached:  []string{},
		Maps:      totals.Maps,
		FlowsUse:  totals.FlowTableUse,
	}
	for _, ports := range totals.Config.MasqPorts {
		if ports.Count > 0 {
			s.Ports = append(s.Ports, [2]int{int(ports.First), int(ports.First) + int(ports.Count) - 1})
		}
	}
	for _, m := range s.Maps {
		s.Bytes += m.Bytes
	}
	for _, c := range totals.Drops {
		s.Drops = append(s.Drops, drops.CountOf(c))
	}
	for _, network := range totals.Networks {
		s.Connected, s.Dead = s.Connected+network.Connected, s.Dead+network.Dead
	}
	if err := s.addHost(dataDir); err != nil {
		return err
	}
	return p.Document(s, s.Directory, func() { s.print(p) })
}

// addHost adds what is asked of the host's devices.
func (s *status) addHost(dataDir string) error {
	host, err := admin.Open(loader.OpenLoaded, dataDir)
	if err != nil {
		return err
	}
	defer host.Close()
	containers, others, err := host.Detached()
	for _, container := range containers {
		s.Detached = append(s.Detached, "program of "+container)
	}
	added, errAdded := host.NewUplinks()
	for _, name := range added {
		others = append(others, "programs of the new uplink "+name)
	}
	s.Detached = append(s.Detached, others...)
	s.services, s.Services = host.ServicesPath()
	var errAuto error
	s.Auto, errAuto = host.AutoPaths()
	return errors.Join(err, errAdded, errAuto)
}

func (s *status) programs() string {
	if s.Same {
		return programVersion(s.Revision, s.Build)
	}
	return fmt.Sprintf("%s; this binary has %s (`ebpfnetctl upgrade` loads them)",
		programVersion(s.Revision, s.Build), programVersion(bpf.Revision, loader.BuildID(bpf.Build)))
}

var mapTable = output.Table[admin.MapUse]{Columns: []output.Column[admin.MapUse]{
	{Head: "MAP", Text: func(m admin.MapUse) string { return m.Name }},
	{Head: "ENTRIES", Text: entriesOf},
	{Head: "MAX ENTRIES", Text: func(m admin.MapUse) string { return strconv.Itoa(int(m.MaxEntries)) }},
	{Head: "BYTES", Text: func(m admin.MapUse) string { return strconv.FormatUint(m.Bytes, 10) }},
}}

func entriesOf(m admin.MapUse) string {
	if m.Entries == nil {
		return ""
	}
	return strconv.Itoa(*m.Entries)
}

// lines returns the verdict, what it rests on, and the reasons of dropped packets, the most frequent first.
func (s *status) lines() []string {
	verdict := "healthy"
	if len(s.Warnings)+len(s.Detached) > 0 {
		verdict = "not healthy: see the warnings"
	}
	containers := strconv.Itoa(s.Connected)
	if s.Dead > 0 {
		containers += fmt.Sprintf("; %d dead, which the runtime's DEL or GC removes", s.Dead)
	}
	lines := []string{
		"ebpfnet      " + verdict,
		"programs     " + s.programs(),
		"uplinks      " + cmp.Or(strings.Join(s.Uplinks, " "), "none"),
		"containers   " + containers,
		"fast path    auto acts as " + s.auto(),
		"services     " + s.services,
	}
	for _, warning := range s.Warnings {
		lines = append(lines, "warning      "+warning)
	}
	for _, detached := range s.Detached {
		lines = append(lines, "warning      missing: "+detached+" (`ebpfnetctl repair` attaches it)")
	}
	dropped := slices.DeleteFunc(slices.Clone(s.Drops), func(d drops.Count) bool { return d.Packets == 0 })
	slices.SortStableFunc(dropped, func(a, b drops.Count) int { return cmp.Compare(b.Packets, a.Packets) })
	for _, d := range dropped {
		lines = append(lines, fmt.Sprintf("dropped      %d by %s: %s", d.Packets, d.Reason, d.Meaning))
	}
	return lines
}

// auto returns what fastPath auto acts as, and why not as always.
func (s *status) auto() string {
	var families []string
	for _, path := range s.Auto {
		text := fmt.Sprintf("%s for %s", path.ActsAs, path.Family)
		if len(path.Because) > 0 {
			text += " (" + strings.Join(path.Because, ", ") + ")"
		}
		families = append(families, text)
	}
	return strings.Join(families, ", ")
}

func (s *status) print(p *output.Printer) {
	const maxLines = 15

	lines := s.lines()
	if more := len(lines) - maxLines; more > 0 && p.Format != output.Wide {
		lines = append(lines[:maxLines-1], fmt.Sprintf("(%d more lines with -o wide)", more+1))
	}
	for _, line := range lines {
		p.Printf("%s\n", line)
	}
	if p.Format != output.Wide {
		return
	}
	ports := texts(s.Ports, func(r [2]int) string { return fmt.Sprintf("%d to %d", r[0], r[1]) })
	p.Printf("pins         %s\nmasq ports   %s\nflow table   %.0f %% used by established connections\n\n", s.Directory, strings.Join(ports, ", "), 100*s.FlowsUse)
	mapTable.PrintRows(p, s.Maps)
	p.Printf("%d bytes in all maps\n", s.Bytes)
}
