package testenv

import (
	"context"
	"math"
	"net/netip"
	"strconv"
	"time"
)

// Ping sends one echo request and waits for its reply until ctx is done, by iputils'
// ping. Further arguments are ping's: "-s", "1472", "-M", "do". The error of a ping
// without reply holds what ping printed, such as an ICMP error.
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
