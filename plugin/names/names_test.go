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
	if parsed, ok := ParseAlias(Alias(attachment)); !ok || parsed != attachment {
		t.Errorf("alias %q was parsed as %v, %v", Alias(attachment), parsed, ok)
	}
	for _, owner := range []loader.Owner{0, 1, 1 << 63, ^loader.Owner(0)} {
		if name := HostDevice(owner); len(name) != unix.IFNAMSIZ-1 || !strings.HasPrefix(name, "ebpf") {
			t.Errorf("owner %x: name %s", owner, name)
		}
		for _, mac := range []byte{HostMAC(owner)[0], ContainerMAC(owner)[0]} {
			if mac&1 != 0 || mac&2 == 0 {
				t.Errorf("owner %x: first octet %x is not that of a local unicast address", owner, mac)
			}
		}
	}
}

func TestParseAliasOfOthers(t *testing.T) {
	for _, alias := range []string{"", "ebpfnet", "ebpfnet pods c1", "ebpfnet pods c1 eth0 more", "other pods c1 eth0"} {
		if a, ok := ParseAlias(alias); ok {
			t.Errorf("alias %q was parsed as %v", alias, a)
		}
	}
}
