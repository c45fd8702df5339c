package cnierr

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
)

func TestWithCode(t *testing.T) {
	for _, test := range []struct {
		err  error
		code uint
	}{
		{flock.ErrBusy, cnitypes.ErrTryAgainLater},
		{ipam.ErrConfig, cnitypes.ErrInvalidNetworkConfig},
		{ipam.ErrExhausted, CodeAddressesExhausted},
		{ipam.ErrTaken, CodeAddressTaken},
		{ipam.ErrDuplicate, CodeAttachmentExists},
		{&maps.TakenError{IsPort: true}, CodePortTaken},
		{&maps.TakenError{}, CodeAddressTaken},
		{maps.ErrFull, cnitypes.ErrTryAgainLater},
		{loader.ErrIncompatible, CodeIncompatible},
		{loader.ErrNotSupported, CodeNotSupported},
		{&fs.PathError{Op: "open", Path: "/d", Err: unix.ENOSPC}, cnitypes.ErrIOFailure},
		{errors.New("anything else"), cnitypes.ErrInternal},
		{cnitypes.NewError(42, "has one", ""), 42},
	} {
		var coded *cnitypes.Error
		err := WithCode(fmt.Errorf("do: %w", test.err))
		if !errors.As(err, &coded) || coded.Code != test.code {
			t.Errorf("got %#v, want code %d", err, test.code)
		}
	}
	if err := WithCode(nil); err != nil {
		t.Errorf("no error became %v", err)
	}
}
