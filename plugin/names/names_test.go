package names

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// TestNames pins the names that the next version must find.
func TestNames(t *testing.T) {
	attachment := maps.Attachment{Network: "pods", ContainerID: "c1", IfName: "eth0"}
	owner := attachment.Owner()
	got := fmt.Sprint(HostDevice(owner), " ", HostMAC(owner), " ", ContainerMAC(owner), " ", Alias(attachment))
	if want := "ebpfc4e7a2d3fc8 06:eb:c4:e7:a2:d3 02:eb:c4:e7:a2:d3 ebpfnet pods c1 eth0"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, owner := range []loader.Owner{0, 1, 1 << 63, ^loader.Owner(0)} {
		if name := HostDevice(owner); len(name) != unix.IFNAMSIZ-1 || !strings.HasPrefix(name, "ebpf") {
			t.Errorf("owner %s: name %s", owner, name)
		}
		for _, mac := range []byte{HostMAC(owner)[0], ContainerMAC(owner)[0]} {
			if mac&1 != 0 || mac&2 == 0 {
				t.Errorf("owner %s: first octet %x is not that of a local unicast address", owner, mac)
			}
		}
	}
}

// TestAlias requires that an alias leads back to its attachment, whatever the length of the names.
func TestAlias(t *testing.T) {
	const longest = 255 // of an alias
	short := maps.Attachment{Network: "pods", ContainerID: "c1", IfName: "eth0"}
	full := maps.Attachment{Network: "pods", IfName: "eth0"}
	full.ContainerID = strings.Repeat("c", longest-len(Of(full)))
	over := full
	over.ContainerID += "c"
	huge := maps.Attachment{Network: strings.Repeat("n", 5000), ContainerID: strings.Repeat("c", 5000), IfName: "eth0"}
	for _, test := range []struct {
		a     maps.Attachment
		named bool
	}{{short, true}, {full, true}, {over, false}, {huge, false}} {
		alias := Alias(test.a)
		label, ok := ParseAlias(alias)
		if !ok || len(alias) > longest || label.Owner != test.a.Owner() || label.Network != maps.NetworkToken(test.a.Network) {
			t.Errorf("alias %q of %d characters: got %+v, %v", alias, len(alias), label, ok)
		}
		if label.IsNamed() != test.named || Fit(test.a) != test.named || test.named && label.Attachment != test.a {
			t.Errorf("alias %q: got names %+v, want some: %v", alias, label.Attachment, test.named)
		}
		if !label.IsIn(test.a.Network) || label.IsIn(test.a.Network+"x") {
			t.Errorf("alias %q: not in its network alone", alias)
		}
	}
}

func TestParseAliasOfOthers(t *testing.T) {
	for _, alias := range []string{"", "ebpfnet", "ebpfnet pods c1", "ebpfnet pods c1 eth0 more", "other pods c1 eth0",
		"ebpfnet 0 eth0", "ebpfnet eth0 0", "ebpfnet 0 10000000000000000"} {
		if a, ok := ParseAlias(alias); ok {
			t.Errorf("alias %q was parsed as %v", alias, a)
		}
	}
}
