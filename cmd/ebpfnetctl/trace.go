package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/trace"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

func newTrace() *cobra.Command {
	var flags output.Flags
	var options trace.Options
	var dirs directories
	cmd := &cobra.Command{
		Use:   "trace FROM TO[:PORT][/PROTO]",
		Short: "what would become of a packet, hook by hook",
		Long: `Shows what would become of the first packet of a connection: the verdict of
each program, the reason of a drop, the translation, and the flow; and the
kernel's route and neighbor in between. Nothing is sent, and nothing is written:
copies of the loaded programs run on a packet that trace makes, with copies of
the entries of its connection.

FROM and TO are a CONTAINER, an address, "host", or "outside" for any address
there. PORT is 80 if it is left out, and of UDP 53; PROTO is tcp, udp or icmp,
and tcp if it is left out. With FROM:PORT of a known connection it is the next
packet of that one.

Exits with 3 if the packet or its reply is dropped. What the host's rules
translate (a service of kube-proxy, say) is shown for a known connection that is
on the fast path, and of its firewall the chains that may drop the packet:
"ebpfnetctl doctor --send" shows what they do.
Real packets are shown by "ebpfnetctl drops --follow" and pwru.

` + containerHelp,
		Example: `  ebpfnetctl trace web 203.0.113.9:443
  ebpfnetctl trace outside 192.0.2.1:8080 --reply
  ebpfnetctl trace client web:53/udp -o json | jq -r .request.verdict`,
		Args:              twoWords,
		ValidArgsFunction: completeContainers(&dirs, 2),
		RunE: func(cmd *cobra.Command, words []string) error {
			attachments, err := parseTrace(cmd.Name(), words, dirs, &options)
			if err != nil {
				return err
			}
			return runTrace(cmd.Context(), output.New(cmd.OutOrStdout(), flags), attachments, options)
		},
	}
	flags.AddToWrite(cmd.Flags())
	dirs.add(cmd)
	cmd.Flags().BoolVar(&options.Reply, "reply", false, "trace the reply, too")
	cmd.Flags().BoolVarP(&options.IPv6, "ipv6", "6", false, "by IPv6, where both ends have both families")
	return cmd
}

func twoWords(cmd *cobra.Command, words []string) error {
	if len(words) < 2 {
		return usageError{fmt.Errorf("%s: expected FROM and TO[:PORT][/PROTO]", cmd.Name())}
	}
	return atMost(cmd, words, 2)
}

func runTrace(ctx context.Context, p *output.Printer, attachments []*admin.Attachment, options trace.Options) error {
	result, err := trace.Run(ctx, attachments, options)
	if err != nil {
		return err
	}
	err = p.Document(result, "", func() {
		printPath(p, "packet", result.Protocol, result.Request)
		if result.Reply != nil {
			p.Printf("\n")
			printPath(p, "reply", result.Protocol, result.Reply)
		}
	})
	if err != nil {
		return err
	}
	if result.IsDropped() {
		return errFound
	}
	return nil
}

func printPath(p *output.Printer, what, protocol string, path *trace.Path) {
	p.Printf("%s  %s %s > %s\n", what, protocol, path.Source, path.Destination)
	at := ""
	for _, step := range path.Steps {
		if now := step.Hook + " on " + step.On; now != at {
			p.Printf("%s\n", now)
			at = now
		}
		p.Printf("  %s: %s\n", step.Step, step.What)
	}
	p.Printf("%s %s\n", path.Verdict, path.Detail)
}

// parseTrace reads FROM[:PORT] and TO[:PORT][/PROTO]. It checks their form before it looks anything up.
func parseTrace(command string, words []string, dirs directories, o *trace.Options) (attachments []*admin.Attachment, err error) {
	to, protocol, err := cutProtocol(command, words[1])
	if err != nil {
		return nil, err
	}
	from, fromPort, errFrom := cutPort("FROM", words[0])
	to, toPort, errTo := cutPort("TO", to)
	if err := errors.Join(errFrom, errTo); err != nil {
		return nil, usageError{fmt.Errorf("%s: %w", command, err)}
	}
	if protocol == "icmp" && toPort != 0 {
		return nil, usageError{fmt.Errorf("%s: TO has port %d: expected none with icmp", command, toPort)}
	}
	o.Protocol, o.FromPort, o.ToPort = protocol, fromPort, toPort
	if defaults := map[string]uint16{"tcp": 80, "udp": 53}; toPort == 0 {
		o.ToPort = defaults[protocol]
	}
	attachments, err = containers.Attachments(dirs.data, dirs.cache)
	if attachments == nil {
		return nil, err
	}
	o.From, errFrom = endOf(command, attachments, from)
	o.To, errTo = endOf(command, attachments, to)
	if o.From.Outside && o.To.Outside || o.From.Host && o.To.Host {
		errTo = usageError{fmt.Errorf("%s: FROM and TO are both %s: expected two ends", command, show.Value(from))}
	}
	return attachments, errors.Join(errFrom, errTo)
}

// cutProtocol cuts /PROTO off. NETWORK/CONTAINER has a slash as well.
func cutProtocol(command, word string) (rest, protocol string, err error) {
	at := strings.LastIndexByte(word, '/')
	if at < 0 {
		return word, "tcp", nil
	}
	rest, protocol = word[:at], word[at+1:]
	_, notAddress := netip.ParseAddr(rest)
	switch {
	case protocol == "tcp", protocol == "udp", protocol == "icmp":
		return rest, protocol, nil
	case strings.Contains(rest, ":") || notAddress == nil || rest == "host" || rest == "outside":
		return "", "", usageError{fmt.Errorf("%s: protocol %s: expected tcp, udp or icmp", command, show.Value(protocol))}
	default:
		return word, "tcp", nil
	}
}

// cutPort cuts :PORT off. An IPv6 address with a port is in brackets.
func cutPort(what, word string) (end string, port uint16, err error) {
	end, text, err := net.SplitHostPort(word)
	if err != nil { // there is no port
		return strings.TrimSuffix(strings.TrimPrefix(word, "["), "]"), 0, nil
	}
	number, err := strconv.ParseUint(text, 10, 16)
	if err != nil || number == 0 {
		return "", 0, fmt.Errorf("%s has the port %s: expected 1 to 65535", what, show.Value(text))
	}
	return end, uint16(number), nil
}

func endOf(command string, attachments []*admin.Attachment, word string) (trace.End, error) {
	switch word {
	case "host":
		return trace.End{Host: true}, nil
	case "outside":
		return trace.End{Outside: true}, nil
	}
	addr, err := netip.ParseAddr(word)
	if err == nil && addr.Zone() != "" {
		return trace.End{}, usageError{fmt.Errorf("%s: address %s: expected one without a zone", command, show.Value(word))}
	}
	if err == nil {
		return trace.End{Address: addr.Unmap()}, nil
	}
	found, err := findContainer(attachments, word)
	return trace.End{Container: found}, err
}
