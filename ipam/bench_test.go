package ipam

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"testing"
)

// The cost of ADD and DEL beside n consecutive reservations: for one more container, for one
// where the round robin must skip all n, and for one that replaces another.
func BenchmarkReserveRelease(b *testing.B) {
	for _, n := range []int{1, 1000, 10_000, 65_000} {
		pool, dir := newPool(b, `[[{"subnet": "10.1.0.0/16"}]]`)
		addr, more := netip.MustParseAddr("10.1.0.2"), Attachment{"more", "eth0"}
		holders := make([]Attachment, n)
		for i := range holders {
			holders[i] = Attachment{fmt.Sprintf("c%d", i), "eth0"}
			write(b, filepath.Join(dir, addr.String()), string(encodeRecord(holders[i])))
			addr = addr.Next()
		}
		setLast := func(last string) { write(b, filepath.Join(dir, lastPrefix+"0"), last) }
		setLast("")
		mustRelease(b, pool, more) // makes the index
		b.Run(fmt.Sprintf("%d/one more", n), func(b *testing.B) {
			for b.Loop() {
				setLast(addr.String())
				mustReserve(b, pool, more)
				mustRelease(b, pool, more)
			}
		})
		b.Run(fmt.Sprintf("%d/behind all", n), func(b *testing.B) {
			for b.Loop() {
				setLast("10.1.255.254")
				mustReserve(b, pool, more)
				mustRelease(b, pool, more)
			}
		})
		b.Run(fmt.Sprintf("%d/in place of any", n), func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				holder := &holders[rand.IntN(n)]
				mustRelease(b, pool, *holder)
				holder.IfName = fmt.Sprintf("eth%d", i)
				mustReserve(b, pool, *holder)
			}
		})
	}
}
