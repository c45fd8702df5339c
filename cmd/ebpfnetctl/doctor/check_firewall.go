package doctor

import (
	"context"
	"strings"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/firewall"
)

// lookFirewall finds chains that drop containers' packets unless a rule accepts them.
func lookFirewall(ctx context.Context, h *host) (findings []Finding, err error) {
	rules := firewall.Read(ctx)
	for _, chain := range rules.Forward {
		var accept []string
		for _, subnet := range h.subnets() {
			if chain.Drops != "" && chain.Applies(subnet) {
				accept = append(accept, chain.Accept(subnet))
			}
		}
		if len(accept) > 0 {
			findings = append(findings, warning(strings.Join(accept, " && "),
				"%s drops forwarded packets that no rule accepts, because %s; `ebpfnetctl doctor --send` proves whether it drops those of containers", chain, chain.Drops))
		}
	}
	for _, what := range rules.Unread {
		findings = append(findings, warning("run the tool by hand", "not all rules could be read: %s", what))
	}
	return orGood(findings, "no chain drops all forwarded packets"), nil
}
