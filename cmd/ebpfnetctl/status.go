package main

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// status is what `ebpfnetctl status -o json` prints: schema/status.json.
type status struct {
	Directory string            `json:"directory"`
	Revision  uint32            `json:"revision"` // of the programs
	Build     loader.BuildID    `json:"build"`
	Same      bool              `json:"sameAsThisBinary"`
	Ports     [][2]int          `json:"masqueradePorts"` // the first and the last of each range
	Uplinks   []string          `json:"uplinks"`
	Warnings  []string          `json:"warnings"` // about the host
	Features  []feature         `json:"features"`
	Maps      []operator.MapUse `json:"maps"`
	Bytes     uint64            `json:"bytes"` // of all maps
	Drops     []drop            `json:"drops"`

	Containers []containerDrops `json:"containers"` // those with drops
}

type drop struct {
	Reason  string `json:"reason"`
	Meaning string `json:"meaning"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// containerDrops are the dropped packets from and to one container.
type containerDrops struct {
	Device string `json:"device"` // the host's end of its veth
	Owner  string `json:"owner"`
	Drops  []drop `json:"drops"`
}

func dropOf(count maps.DropCount) drop {
	return drop{count.Reason.Name(), count.Reason.String(), count.Packets, count.Bytes}
}

func newStatus() *cobra.Command {
	var flags output.Flags
	cmd := &cobra.Command{
		Use:   "status",
		Short: "loaded programs, features, memory, drop counters",
		Long: `Prints what is loaded: programs, uplinks, what was chosen for this kernel (-o
wide says why), the maps and their memory, and what was dropped and why.`,
		Example: "  ebpfnetctl status\n  ebpfnetctl status -o json | jq -e .sameAsThisBinary",
		Args:    noWords,
		RunE:    func(cmd *cobra.Command, _ []string) error { return printStatus(output.New(cmd.OutOrStdout(), flags)) },
	}
	flags.AddToNoun(cmd.Flags())
	return cmd
}

// printStatus prints what is loaded.
func printStatus(p *output.Printer) error {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return err
	}
	defer datapath.Close()

	s, err := collect(datapath)
	if err != nil {
		return err
	}
	return p.Document(s, s.Directory, func() { s.print(p) })
}

func collect(datapath *loader.Datapath) (*status, error) {
	config := datapath.Config
	chosen, err := features(datapath)
	if err != nil {
		return nil, err
	}
	s := &status{
		Directory: datapath.Dir(),
		Revision:  config.Revision,
		Build:     loader.BuildID(config.Build),
		Same:      config.Build == bpf.Build(),
		Features:  chosen,
		Uplinks:   []string{}, // not null
		Warnings:  []string{},
	}
	for _, ports := range config.MasqPorts {
		if ports.Count > 0 {
			s.Ports = append(s.Ports, [2]int{int(ports.First), int(ports.First) + int(ports.Count) - 1})
		}
	}
	if s.Maps, err = operator.MapUses(datapath); err != nil {
		return nil, err
	}
	for _, m := range s.Maps {
		s.Bytes += m.Bytes
	}
	uplinks, err := maps.Uplinks(datapath)
	if err != nil {
		return nil, err
	}
	for _, uplink := range uplinks {
		if uplink.ContainerBridge {
			continue
		}
		s.Uplinks = append(s.Uplinks, deviceName(uplink.IfIndex))
	}
	warnings, err := operator.Warnings(datapath)
	if err != nil {
		return nil, err
	}
	s.Warnings = append(s.Warnings, warnings...)
	counters, err := maps.DropTotals(datapath)
	if err != nil {
		return nil, err
	}
	for _, c := range counters {
		s.Drops = append(s.Drops, dropOf(c))
	}
	return s, s.addContainers(datapath)
}

func (s *status) addContainers(datapath *loader.Datapath) error {
	s.Containers = []containerDrops{} // not null
	devices, err := maps.Devices(datapath)
	if err != nil {
		return err
	}
	drops, err := maps.Drops(datapath)
	if err != nil {
		return err
	}
	for _, device := range devices {
		c := containerDrops{Device: deviceName(device.IfIndex), Owner: device.Owner.String()}
		for _, d := range drops {
			if d.Owner == device.Owner {
				c.Drops = append(c.Drops, dropOf(d.DropCount))
			}
		}
		if len(c.Drops) > 0 {
			s.Containers = append(s.Containers, c)
		}
	}
	slices.SortFunc(s.Containers, func(a, b containerDrops) int { return strings.Compare(a.Device, b.Device) })
	return nil
}

func (s *status) programs() string {
	if s.Same {
		return programVersion(s.Revision, s.Build)
	}
	return fmt.Sprintf("%s; this binary has %s (`ebpfnetctl upgrade` loads them)",
		programVersion(s.Revision, s.Build), programVersion(bpf.Revision, loader.BuildID(bpf.Build())))
}

func deviceName(index int) string {
	device, err := net.InterfaceByIndex(index)
	if err != nil {
		return fmt.Sprintf("device %d (gone)", index)
	}
	return device.Name
}

// featureTable comes below the first lines of a status. It has no headings.
var featureTable = output.Noun[feature]{Columns: []output.Column[feature]{
	{Text: func(f feature) string { return f.Name }},
	{Text: func(f feature) string { return f.Chosen }},
	{Text: func(f feature) string { return f.Why }, Wide: true},
}}

var mapTable = output.Noun[operator.MapUse]{Columns: []output.Column[operator.MapUse]{
	{Head: "MAP", Text: func(m operator.MapUse) string { return m.Name }},
	{Head: "ENTRIES", Text: entriesOf, Right: true},
	{Head: "MAX ENTRIES", Text: func(m operator.MapUse) string { return strconv.Itoa(int(m.MaxEntries)) }, Right: true},
	{Head: "BYTES", Text: func(m operator.MapUse) string { return strconv.FormatUint(m.Bytes, 10) }, Right: true},
}}

func entriesOf(m operator.MapUse) string {
	if m.Entries == nil {
		return ""
	}
	return strconv.Itoa(*m.Entries)
}

func (s *status) print(p *output.Printer) {
	var ports []string
	for _, r := range s.Ports {
		ports = append(ports, fmt.Sprintf("%d to %d", r[0], r[1]))
	}
	p.Printf("pins         %s\nprograms     %s\nmasq ports   %s\nuplinks      %s\n",
		s.Directory, s.programs(), strings.Join(ports, ", "), cmp.Or(strings.Join(s.Uplinks, " "), "none"))
	for _, warning := range s.Warnings {
		p.Printf("warning      %s\n", p.Paint(output.Yellow, warning))
	}
	p.Printf("\n")
	featureTable.Table(p.WithoutHeaders(), s.Features)
	p.Printf("\n")
	mapTable.Table(p, s.Maps)
	p.Printf("%d bytes in all maps\n\ndropped packets\n", s.Bytes)
	printDrops(p, s.Drops)
	for _, c := range s.Containers {
		p.Printf("\ndropped packets of the container behind %s\n", c.Device)
		printDrops(p, c.Drops)
	}
}

func printDrops(p *output.Printer, drops []drop) {
	for _, d := range drops {
		p.Printf("%12d  %-11s  %s\n", d.Packets, d.Reason, d.Meaning)
	}
}
