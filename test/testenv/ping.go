package testenv

import (
	"context"
	"math"
	"net/netip"
	"strconv"
	"time"
)

// Ping sends one echo request with ping of iputils and waits for the reply until ctx ends. args are
// further arguments of ping: "-s", "1472", "-M", "do". Without a reply, the error includes ping's
// output, such as an ICMP error.
func Ping(ctx context.Context, ns *Namespace, to netip.Addr, args ...string) error {
	wait := Timeout
	if deadline, ok := ctx.Deadline(); ok {
		wait = time.Until(deadline)
	}
	seconds := strconv.Itoa(max(1, int(math.Ceil(wait.Seconds()))))
	args = append([]string{"-n", "-c", "1", "-W", seconds}, args...)
	_, err := ns.Run(ctx, "ping", append(args, to.String())...)
	return err
}
