package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Our own error codes. The specification keeps those below 100 for itself.
const (
	CodeAddressesExhausted uint = 100 // no free address in a range set
	CodeAddressTaken       uint = 101 // a requested address is held by another attachment
	CodeAttachmentExists   uint = 102 // ADD for an attachment that exists
	CodePortTaken          uint = 103 // a host port is held by another attachment
	CodeIncompatible       uint = 104 // the loaded datapath is of another version
	CodeNotSupported       uint = 105 // the host lacks what ebpfnet needs
	CodeDiffers            uint = 106 // CHECK: something is not as ADD left it
)

// codes says which cause gets which code; the first that fits.
var codes = []struct {
	cause error
	code  uint
}{
	{flock.ErrBusy, cnitypes.ErrTryAgainLater},
	{ipam.ErrConfig, cnitypes.ErrInvalidNetworkConfig},
	{ipam.ErrExhausted, CodeAddressesExhausted},
	{ipam.ErrTaken, CodeAddressTaken},
	{ipam.ErrDuplicate, CodeAttachmentExists},
	{maps.ErrTaken, CodeAddressTaken},
	{loader.ErrIncompatible, CodeIncompatible},
	{loader.ErrNotSupported, CodeNotSupported},
	{link.ErrNoIPv6, CodeNotSupported},
	{link.ErrNoNetkit, CodeNotSupported},
	{unix.ENOTDIR, cnitypes.ErrIOFailure},
	{unix.EROFS, cnitypes.ErrIOFailure},
	{unix.ENOSPC, cnitypes.ErrIOFailure},
}

// cniError gives an error the code of its cause, and keeps one that has a code.
func cniError(err error) error {
	var coded *cnitypes.Error
	if err == nil || errors.As(err, &coded) {
		return err
	}
	var port *maps.HostPortTakenError
	if errors.As(err, &port) {
		return cnitypes.NewError(CodePortTaken, err.Error(), "")
	}
	for _, c := range codes {
		if errors.Is(err, c.cause) {
			return cnitypes.NewError(c.code, err.Error(), "")
		}
	}
	var path *fs.PathError
	if errors.As(err, &path) {
		return cnitypes.NewError(cnitypes.ErrIOFailure, err.Error(), "")
	}
	return cnitypes.NewError(cnitypes.ErrInternal, err.Error(), "")
}

// withDetails adds what went wrong besides to an error with a code.
func withDetails(err, besides error) error {
	var coded *cnitypes.Error
	if besides == nil || !errors.As(err, &coded) {
		return err
	}
	return cnitypes.NewError(coded.Code, coded.Msg, strings.TrimPrefix(coded.Details+"; "+besides.Error(), "; "))
}

// withPrefix says in whose name an error with a code speaks.
func withPrefix(err error, prefix string) error {
	var coded *cnitypes.Error
	if !errors.As(err, &coded) {
		return err
	}
	return cnitypes.NewError(coded.Code, prefix+coded.Msg, coded.Details)
}

// invalid is an error of the configuration: what the key says, and what it should.
func invalid(key string, value any, expected string) error {
	return cnitypes.NewError(cnitypes.ErrInvalidNetworkConfig, fmt.Sprintf("%s %s: expected %s", key, show(value), expected), "")
}

// unsupported is an error for a key that the specification knows and we do not.
func unsupported(key string, value any, why string) error {
	return cnitypes.NewError(cnitypes.ErrUnsupportedField, fmt.Sprintf("%s %s: %s", key, show(value), why), "")
}

// invalidEnv is an error of a CNI_ variable.
func invalidEnv(variable string, value any, expected string) error {
	return cnitypes.NewError(cnitypes.ErrInvalidEnvironmentVariables, fmt.Sprintf("%s %s: expected %s", variable, show(value), expected), "")
}

// show prints a value as the configuration has it.
func show(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(text)
}
