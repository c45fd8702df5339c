package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// turned is a connection that a change of policies would turn, as schema/policy.json describes it.
type turned struct {
	Pod         string `json:"pod"`
	Direction   string `json:"direction"`
	Protocol    string `json:"protocol"`
	Source      string `json:"source"`
	Destination string `json:"destination"`
	IsDrop      bool   `json:"drop"`   // of --drops; else it is live
	Admits      bool   `json:"admits"` // after the change
	Why         string `json:"why"`
}

type previewOptions struct {
	output.Flags
	dirs               directories
	file, drops, state string
	deleted            []string
}

func newPolicyPreview() *cobra.Command {
	var o previewOptions
	cmd := &cobra.Command{
		Use:   "preview [-f FILE] [--delete [NAMESPACE/]NAME]",
		Short: "which connections of this node a change of policies would turn",
		Long: `Asks the node agent what would change on this node if NetworkPolicies or
ClusterNetworkPolicies were applied or deleted: which of its pods' connections
would end, and with --drops, which dropped ones would be admitted. Nothing is
applied. Policies of -f replace those of the same name.

Exits with 3 if a live connection would end.`,
		Example: `  ebpfnetctl policy preview -f new.yaml
  ebpfnetctl policy preview --delete shop/old -f new.yaml
  kubectl logs -n kube-system ebpfnet-node-x4k2p > drops.json
  ebpfnetctl policy preview -f new.yaml --drops drops.json -o json`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.file == "" && len(o.deleted) == 0 {
				return usageError{errors.New("policy preview: expected -f FILE or --delete [NAMESPACE/]NAME")}
			}
			return preview(cmd, o)
		},
	}
	o.AddToWrite(cmd.Flags())
	o.dirs.add(cmd)
	cmd.Flags().StringVarP(&o.file, "file", "f", "", "`FILE` has policies")
	cmd.Flags().StringSliceVar(&o.deleted, "delete", nil, "a policy that is deleted, `[NAMESPACE/]NAME`; repeatable")
	cmd.Flags().StringVar(&o.drops, "drops", "", "`FILE` has lines of drops --follow -o json, or of the agent's --log-denied")
	cmd.Flags().StringVar(&o.state, "state", nodestate.Default, "`FILE` of the node agent")
	return cmd
}

func preview(cmd *cobra.Command, o previewOptions) error {
	var text []byte
	var err error
	if o.file != "" {
		text, err = os.ReadFile(o.file)
	}
	if err != nil {
		return err
	}
	list, err := o.connections()
	if err != nil {
		return err
	}
	ask := nodestate.Preview{Objects: string(text), Deleted: o.deleted, Connections: []nodestate.Connection{}}
	for _, c := range list {
		ask.Connections = append(ask.Connections, c.asked)
	}
	answer, err := askAgent(cmd.Context(), o.state, ask)
	if err != nil {
		return fmt.Errorf("ask the node agent: %w", err)
	}
	for _, warning := range answer.Warnings {
		output.Printf(cmd.ErrOrStderr(), "ebpfnetctl: policy %s\n", warning)
	}
	all := []turned{}
	for _, turn := range answer.Turns {
		t := list[turn.Connection].turned
		t.Pod, t.Admits, t.Why = turn.Pod, turn.Admits, turn.Why
		if turn.Admits == t.IsDrop {
			all = append(all, t)
		}
	}
	p := output.New(cmd.OutOrStdout(), o.Flags)
	err = p.Document(all, "", func() { turnedTable.PrintRows(p, all) })
	if err == nil && slices.ContainsFunc(all, func(t turned) bool { return !t.Admits }) {
		return errFound
	}
	return err
}

// known is a connection that is live, or was dropped.
type known struct {
	asked  nodestate.Connection
	turned turned
}

// protocols are those whose ports rules name.
var protocols = map[string]maps.Protocol{"tcp": maps.TCP, "udp": maps.UDP, "sctp": maps.SCTP}

// addConnection adds what one direction of a pod judges.
type addConnection func(protocol maps.Protocol, pod, peer netip.AddrPort, isEgress, isDrop bool)

// connections lists both directions of connections, as far as they are of containers of this host with another peer.
func (o *previewOptions) connections() ([]known, error) {
	attachments, err := containers.Attachments(o.dirs.data, o.dirs.cache)
	if attachments == nil {
		return nil, err
	}
	explainer, done, err := openExplainer(o.state)
	if err != nil {
		return nil, err
	}
	defer done()
	byAddr := admin.ByAddress(attachments)
	var list []known
	var errs []error
	add := func(protocol maps.Protocol, pod, peer netip.AddrPort, isEgress, isDrop bool) {
		source, destination := peer, pod
		if isEgress {
			source, destination = pod, peer
		}
		if byAddr[pod.Addr()] == nil {
			return
		}
		other, err := explainer.PeerOf(peer.Addr())
		errs = append(errs, err)
		if other.Host {
			return
		}
		list = append(list, known{
			nodestate.Connection{Pod: pod.Addr(), IsEgress: isEgress, Peer: peer.Addr(), Protocol: uint8(protocol), Port: destination.Port()},
			turned{Direction: admin.DirectionOf(isEgress), Protocol: protocol.String(),
				Source: source.String(), Destination: destination.String(), IsDrop: isDrop},
		})
	}
	errs = append(errs, eachLive(attachments, add), o.eachDrop(add))
	return list, errors.Join(errs...)
}

// eachLive adds the connections that conntrack knows, as the rules see them, and others that the datapath translates. Who
// has opened those that bypass conntrack otherwise is not known.
func eachLive(attachments []*admin.Attachment, add addConnection) error {
	var tracked []rtnl.Tracked
	if err := rtnl.TrackedConnections(func(t rtnl.Tracked) { tracked = append(tracked, t) }); err != nil {
		return err
	}
	seen := map[[2]netip.AddrPort]bool{} // in both directions
	for _, t := range tracked {
		for _, pair := range [][2]netip.AddrPort{{t.Opener, t.Asked}, {t.Opener, t.Server}} {
			seen[pair], seen[[2]netip.AddrPort{pair[1], pair[0]}] = true, true
		}
		add(maps.Protocol(t.Protocol), t.Opener, t.Server, true, false)
		add(maps.Protocol(t.Protocol), t.Server, t.Client, false, false)
	}
	flows, err := admin.Flows(attachments, admin.FlowFilter{})
	for _, f := range flows {
		destination := f.Destination.AddrPort
		if f.TranslatedDestination.IsValid() {
			destination = f.TranslatedDestination.AddrPort
		}
		isSeen := seen[[2]netip.AddrPort{f.Source.AddrPort, f.Destination.AddrPort}] || seen[[2]netip.AddrPort{f.Source.AddrPort, destination}]
		if protocol, isKnown := protocols[f.Protocol]; isKnown && !isSeen && f.State != "" && f.Offload == "" {
			add(protocol, f.Source.AddrPort, destination, true, false)
			add(protocol, destination, f.Source.AddrPort, false, false)
		}
	}
	return err
}

func (o *previewOptions) eachDrop(add addConnection) error {
	if o.drops == "" {
		return nil
	}
	file, err := os.Open(o.drops)
	if err != nil {
		return err
	}
	defer file.Close()
	type key struct{ protocol, source, destination, ruleSet string }
	seen := map[key]bool{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var d drops.Drop
		if err := json.Unmarshal(lines.Bytes(), &d); err != nil {
			continue // a line of the agent's log
		}
		its := key{d.Protocol, d.Source, d.Destination, d.RuleSet}
		if seen[its] {
			continue
		}
		seen[its] = true
		protocol, isKnown := protocols[d.Protocol]
		source, errSource := netip.ParseAddrPort(d.Source)
		destination, errDestination := netip.ParseAddrPort(d.Destination)
		switch {
		case !isKnown || errSource != nil || errDestination != nil:
		case d.RuleSet == "egress":
			add(protocol, source, destination, true, true)
		case d.RuleSet == "ingress":
			add(protocol, destination, source, false, true)
		}
	}
	return lines.Err()
}

// askAgent asks the agent by its socket.
func askAgent(ctx context.Context, state string, ask nodestate.Preview) (answer nodestate.Previewed, err error) {
	body, err := json.Marshal(ask)
	if err != nil {
		return answer, err
	}
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", nodestate.SocketOf(state))
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent"+nodestate.PreviewPath, bytes.NewReader(body))
	if err != nil {
		return answer, err
	}
	response, err := client.Do(request)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, err := io.ReadAll(response.Body)
		return answer, errors.Join(errors.New(strings.TrimSpace(string(text))), err)
	}
	err = json.NewDecoder(response.Body).Decode(&answer)
	return answer, err
}

var turnedTable = output.Table[turned]{
	Columns: []output.Column[turned]{
		{Head: "POD", Text: func(t turned) string { return t.Pod }},
		{Head: "DIRECTION", Text: func(t turned) string { return t.Direction }},
		{Head: "PROTO", Text: func(t turned) string { return t.Protocol }},
		{Head: "SOURCE", Text: func(t turned) string { return t.Source }},
		{Head: "DESTINATION", Text: func(t turned) string { return t.Destination }},
		{Head: "THEN", Text: func(t turned) string {
			return map[bool]string{false: "ends", true: "admitted"}[t.Admits]
		}},
		{Head: "WHY", Text: func(t turned) string { return t.Why }},
	},
	None: "no connection of this node would turn",
}
