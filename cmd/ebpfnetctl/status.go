package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"text/tabwriter"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// status is what `ebpfnetctl status -o json` prints.
type status struct {
	Directory string      `json:"directory"`
	Attach    string      `json:"attach"`
	Ports     [2]int      `json:"masqueradePorts"` // first and last
	Uplinks   []string    `json:"uplinks"`
	Maps      []mapStatus `json:"maps"`
	Bytes     uint64      `json:"bytes"` // of all maps
	Drops     []drop      `json:"drops"`
}

type mapStatus struct {
	Name       string `json:"name"`
	Entries    int    `json:"entries"`
	MaxEntries uint32 `json:"maxEntries"`
	Bytes      uint64 `json:"bytes"` // as the kernel accounts them
}

type drop struct {
	Reason  string `json:"reason"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

func printStatus(to io.Writer, asJSON bool) error {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return err
	}
	defer datapath.Close()

	s, err := collect(datapath)
	if err != nil {
		return err
	}
	if asJSON {
		encoder := json.NewEncoder(to)
		encoder.SetIndent("", "  ")
		return encoder.Encode(s)
	}
	return s.print(to)
}

func collect(datapath *loader.Datapath) (*status, error) {
	config := datapath.Config
	s := &status{
		Directory: datapath.Dir(),
		Attach:    attachName(bpf.DatapathAttach(config.Attach)),
		Ports:     [2]int{int(config.MasqPortFirst), int(config.MasqPortFirst) + int(config.MasqPortCount) - 1},
	}
	if err := s.addMaps(datapath); err != nil {
		return nil, err
	}
	uplinks, err := maps.Uplinks(datapath)
	if err != nil {
		return nil, err
	}
	for _, uplink := range uplinks {
		s.Uplinks = append(s.Uplinks, deviceName(uplink.IfIndex))
	}
	counters, err := maps.Counters(datapath)
	if err != nil {
		return nil, err
	}
	for _, c := range counters {
		s.Drops = append(s.Drops, drop{c.Reason.String(), c.Packets, c.Bytes})
	}
	return s, nil
}

func (s *status) addMaps(datapath *loader.Datapath) error {
	entries, err := maps.Count(datapath)
	if err != nil {
		return err
	}
	for _, named := range datapath.Maps() {
		m := mapStatus{Name: named.Name, Entries: entries[named.Name], MaxEntries: named.Map.MaxEntries()}
		if m.Bytes, err = mapBytes(named.Map); err != nil {
			return fmt.Errorf("ask for the memory of map %s: %w", named.Name, err)
		}
		s.Maps = append(s.Maps, m)
		s.Bytes += m.Bytes
	}
	return nil
}

func mapBytes(m *ebpf.Map) (uint64, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	bytes, _ := info.Memlock()
	return bytes, nil
}

func attachName(attach bpf.DatapathAttach) string {
	if attach == bpf.DatapathAttachATTACH_TCX {
		return "tcx links"
	}
	return "clsact filters (the kernel has no tcx, which came with 6.6)"
}

func deviceName(index int) string {
	device, err := net.InterfaceByIndex(index)
	if err != nil {
		return fmt.Sprintf("device %d (gone)", index)
	}
	return device.Name
}

func (s *status) print(to io.Writer) error {
	fmt.Fprintf(to, "pins         %s\nattached by  %s\nmasquerades  with ports %d to %d\nuplinks      %s\n\n",
		s.Directory, s.Attach, s.Ports[0], s.Ports[1], strings.Join(s.Uplinks, " "))
	table := tabwriter.NewWriter(to, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "map\tentries\tat most\tbytes\t")
	for _, m := range s.Maps {
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t\n", m.Name, m.Entries, m.MaxEntries, m.Bytes)
	}
	fmt.Fprintf(table, "all\t\t\t%d\t\n", s.Bytes)
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(to, "\npackets dropped")
	for _, d := range s.Drops {
		fmt.Fprintf(to, "%12d  %s\n", d.Packets, d.Reason)
	}
	return nil
}
