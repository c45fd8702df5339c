package plugin

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
)

// TestNames pins what one version writes and the next one must find.
func TestNames(t *testing.T) {
	at := maps.Attachment{Network: "pods", ContainerID: "c1", IfName: "eth0"}
	got := fmt.Sprint(hostName(at.Owner()), " ", hostMAC(at.Owner()), " ", containerMAC(at.Owner()), " ", aliasOf(at))
	if want := "ebpfc4e7a2d3fc8 06:eb:c4:e7:a2:d3 02:eb:c4:e7:a2:d3 ebpfnet pods c1 eth0"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, owner := range []loader.Owner{0, 1, 1 << 63, ^loader.Owner(0)} {
		if name := hostName(owner); len(name) != unix.IFNAMSIZ-1 || !strings.HasPrefix(name, "ebpf") {
			t.Errorf("owner %x: name %s", owner, name)
		}
		for _, mac := range []byte{hostMAC(owner)[0], containerMAC(owner)[0]} {
			if mac&1 != 0 || mac&2 == 0 {
				t.Errorf("owner %x: first octet %x is not that of a local unicast address", owner, mac)
			}
		}
	}
}

func TestErrorCodes(t *testing.T) {
	for _, test := range []struct {
		err  error
		code uint
	}{
		{flock.ErrBusy, cnitypes.ErrTryAgainLater},
		{ipam.ErrConfig, cnitypes.ErrInvalidNetworkConfig},
		{ipam.ErrExhausted, CodeAddressesExhausted},
		{ipam.ErrTaken, CodeAddressTaken},
		{ipam.ErrDuplicate, CodeAttachmentExists},
		{&maps.HostPortTakenError{}, CodePortTaken},
		{loader.ErrIncompatible, CodeIncompatible},
		{loader.ErrNotSupported, CodeNotSupported},
		{&fs.PathError{Op: "open", Path: "/d", Err: unix.ENOSPC}, cnitypes.ErrIOFailure},
		{errors.New("anything else"), cnitypes.ErrInternal},
		{cnitypes.NewError(42, "has one", ""), 42},
	} {
		wantCode(t, cniError(fmt.Errorf("do: %w", test.err)), test.code)
	}
	if err := cniError(nil); err != nil {
		t.Errorf("no error became %v", err)
	}
}
