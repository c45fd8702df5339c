package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/trace"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

func newTrace() *cobra.Command {
	var flags output.Flags
	var options trace.Options
	var dataDir string
	var isLive bool
	cmd := &cobra.Command{
		Use:   "trace FROM TO[:PORT][/PROTO]",
		Short: "what would become of a packet, step by step",
		Long: `Tells what would become of the first packet of a connection: which program,
entry, route and rule decides, and who gets it in the end. Nothing is sent, and
nothing is written: copies of the loaded programs run on a packet that trace
makes, with copies of the entries of its connection.

FROM and TO are a CONTAINER, an address, "host", or "outside" for any address
there. PORT is 80 if it is left out, and of UDP 53; PROTO is tcp, udp or icmp,
and tcp if it is left out. With FROM:PORT of a known connection it is the next
packet of that one.

With --live, it tells the same of real packets between FROM and TO as they come,
ten a second at most: what a device receives is traced, as a packet that is like
it, with the entries of that moment. What leaves a device is named. The
packets are read by a socket, and the datapath knows nothing of that.

Exits with 3 if the packet or its reply is dropped. What the host's stack
translates (a service of kube-proxy, say) is not told, and of its firewall what
it does to the first packet of a TCP connection.

` + containerHelp,
		Example: `  ebpfnetctl trace web 203.0.113.9:443
  ebpfnetctl trace outside 192.0.2.1:8080 --reply
  ebpfnetctl trace client web:53/udp -o json | jq -r .request.verdict
  ebpfnetctl trace --live client outside:443`,
		Args:              twoWords,
		ValidArgsFunction: completeEnds(&dataDir),
		RunE: func(cmd *cobra.Command, words []string) error {
			attachments, err := parseTrace(words, dataDir, isLive, &options)
			if err != nil {
				return err
			}
			if isLive {
				return liveTrace(cmd, output.New(cmd.OutOrStdout(), flags), attachments, options)
			}
			return runTrace(cmd, output.New(cmd.OutOrStdout(), flags), attachments, options)
		},
	}
	flags.AddToVerb(cmd.Flags())
	addDataDir(cmd, &dataDir)
	cmd.Flags().BoolVar(&options.Reply, "reply", false, "tell what becomes of the reply, too")
	cmd.Flags().BoolVarP(&options.IPv6, "ipv6", "6", false, "by IPv6, where both ends have both families")
	cmd.Flags().BoolVar(&isLive, "live", false, "tell the ways of real packets between FROM and TO, until Ctrl-C")
	return cmd
}

// completeEnds completes FROM and TO by the names of containers.
func completeEnds(dataDir *string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, words []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(words) == 1 {
			words = nil // as the first one
		}
		return completeContainers(dataDir)(cmd, words, begun)
	}
}

func twoWords(cmd *cobra.Command, words []string) error {
	if len(words) < 2 {
		return usageError{errors.New("trace: expected FROM and TO[:PORT][/PROTO]")}
	}
	return atMost(cmd, words, 2)
}

// runTrace prints the way of the packet.
func runTrace(cmd *cobra.Command, p *output.Printer, attachments []*operator.Attachment, options trace.Options) error {
	told, err := trace.Run(cmd.Context(), attachments, options)
	if err != nil {
		return err
	}
	if err := p.Document(told, "", func() { printTrace(p, told) }); err != nil {
		return err
	}
	if told.IsDropped() {
		return errFound
	}
	return nil
}

// liveTrace prints the ways of real packets until it is ended.
func liveTrace(cmd *cobra.Command, p *output.Printer, attachments []*operator.Attachment, options trace.Options) error {
	if options.Reply || options.IPv6 || options.FromPort != 0 {
		return usageError{errors.New("trace: --live tells packets of both directions and families: expected no --reply, --ipv6 or port of FROM")}
	}
	return trace.Live(cmd.Context(), attachments, options, func(told *trace.Trace) error {
		if p.ForPrograms() {
			return p.Line(told)
		}
		seen := told.Seen
		if seen.LeftOut > 0 {
			p.Printf("%d packets were left out: too many\n", seen.LeftOut)
		}
		p.Printf("%s %s %s, %d bytes%s\n", seen.Time.Format("15:04:05.000"), where(seen), seen.Device, seen.Bytes, flagsOf(seen))
		printWay(p, "packet", told.Protocol, told.Request)
		return nil
	})
}

func where(seen *trace.Seen) string {
	if seen.Leaving {
		return "leaves by"
	}
	return "comes by"
}

func flagsOf(seen *trace.Seen) string {
	if seen.Flags == "" {
		return ""
	}
	return ", " + seen.Flags
}

func printTrace(p *output.Printer, told *trace.Trace) {
	printWay(p, "packet", told.Protocol, told.Request)
	if told.Reply != nil {
		p.Printf("\n")
		printWay(p, "reply", told.Protocol, told.Reply)
	}
}

func printWay(p *output.Printer, what, protocol string, way *trace.Way) {
	p.Printf("%s  %s %s > %s\n", p.Paint(output.Bold, what), protocol, way.Source, way.Destination)
	at := ""
	for _, step := range way.Steps {
		if now := step.Hook + " on " + step.On; now != at {
			p.Printf("%s\n", now)
			at = now
		}
		p.Printf("  %s: %s\n", step.Step, step.What)
		if step.Entry != "" {
			p.Printf("    (%s)\n", step.Entry)
		}
	}
	color := output.Green
	if way.Fate == trace.Dropped {
		color = output.Red
	}
	p.Printf("%s %s\n", p.Paint(color, string(way.Fate)), way.Verdict)
}

// parseTrace reads FROM[:PORT] and TO[:PORT][/PROTO]. What is wrong with their form is said before anything is
// looked up.
func parseTrace(words []string, dataDir string, isLive bool, o *trace.Options) (attachments []*operator.Attachment, err error) {
	to, protocol, err := cutProtocol(words[1])
	if err != nil {
		return nil, err
	}
	from, fromPort, errFrom := cutPort("FROM", words[0])
	to, toPort, errTo := cutPort("TO", to)
	if err := errors.Join(errFrom, errTo); err != nil {
		return nil, usageError{fmt.Errorf("trace: %w", err)}
	}
	if protocol == "icmp" && toPort != 0 {
		return nil, usageError{fmt.Errorf("trace: TO has port %d: expected none with icmp", toPort)}
	}
	o.Protocol, o.FromPort, o.ToPort = protocol, fromPort, toPort
	if defaults := map[string]uint16{"tcp": 80, "udp": 53}; toPort == 0 && !isLive {
		o.ToPort = defaults[protocol]
	}
	attachments, err = operator.Attachments(dataDir)
	if attachments == nil {
		return nil, err
	}
	o.From, errFrom = endOf(attachments, from)
	o.To, errTo = endOf(attachments, to)
	if o.From.Outside && o.To.Outside || o.From.Host && o.To.Host {
		errTo = usageError{fmt.Errorf("trace: FROM and TO are both %s: expected two ends", show.Value(from))}
	}
	return attachments, errors.Join(errFrom, errTo)
}

// cutProtocol cuts /PROTO off. NETWORK/CONTAINER has a slash as well.
func cutProtocol(word string) (rest, protocol string, err error) {
	at := strings.LastIndexByte(word, '/')
	if at < 0 {
		return word, "tcp", nil
	}
	rest, protocol = word[:at], word[at+1:]
	switch {
	case protocol == "tcp", protocol == "udp", protocol == "icmp":
		return rest, protocol, nil
	case strings.Contains(rest, ":") || isAddress(rest) || rest == "host" || rest == "outside":
		return "", "", usageError{fmt.Errorf("trace: protocol %s: expected tcp, udp or icmp", show.Value(protocol))}
	default:
		return word, "tcp", nil
	}
}

func isAddress(word string) bool {
	_, err := netip.ParseAddr(word)
	return err == nil
}

// cutPort cuts :PORT off. An IPv6 address with a port is in brackets.
func cutPort(what, word string) (end string, port uint16, err error) {
	if isAddress(word) {
		return word, 0, nil
	}
	at := strings.LastIndexByte(word, ':')
	if bracket := strings.LastIndexByte(word, ']'); at < bracket {
		at = -1
	}
	end = word
	if at >= 0 {
		end = word[:at]
		number, err := strconv.ParseUint(word[at+1:], 10, 16)
		if err != nil || number == 0 {
			return "", 0, fmt.Errorf("%s has the port %s: expected 1 to 65535", what, show.Value(word[at+1:]))
		}
		port = uint16(number)
	}
	return strings.TrimSuffix(strings.TrimPrefix(end, "["), "]"), port, nil
}

// endOf finds who is meant.
func endOf(attachments []*operator.Attachment, word string) (trace.End, error) {
	switch word {
	case "host":
		return trace.End{Host: true}, nil
	case "outside":
		return trace.End{Outside: true}, nil
	}
	addr, err := netip.ParseAddr(word)
	if err == nil && addr.Zone() != "" {
		return trace.End{}, usageError{fmt.Errorf("trace: address %s: expected one without a zone", show.Value(word))}
	}
	if err == nil {
		return trace.End{Address: addr.Unmap()}, nil
	}
	found, err := findContainer(attachments, word)
	return trace.End{Container: found}, err
}
