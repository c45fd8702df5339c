// Package cnierr turns errors into those of the CNI specification: it has our error codes, finds
// the code of a cause, and words what is wrong with a configuration.
package cnierr

import (
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
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Our own error codes. The specification reserves those below 100.
const (
	CodeAddressesExhausted uint = 100 // no free address in a range set
	CodeAddressTaken       uint = 101 // a requested address belongs to another attachment
	CodeAttachmentExists   uint = 102 // ADD for an attachment that exists
	CodePortTaken          uint = 103 // a host port belongs to another attachment or process
	CodeIncompatible       uint = 104 // the loaded datapath has another version
	CodeNotSupported       uint = 105 // the host lacks something that ebpfnet needs
	CodeDiffers            uint = 106 // CHECK: the container is not as ADD left it
)

// codes maps causes to codes. The first match counts.
var codes = []struct {
	cause error
	code  uint
}{
	{flock.ErrBusy, cnitypes.ErrTryAgainLater},
	{nodestate.ErrNotSynced, cnitypes.ErrTryAgainLater},
	{nodestate.ErrNoPolicy, cnitypes.ErrTryAgainLater},
	{ipam.ErrConfig, cnitypes.ErrInvalidNetworkConfig},
	{ipam.ErrExhausted, CodeAddressesExhausted},
	{ipam.ErrTaken, CodeAddressTaken},
	{ipam.ErrDuplicate, CodeAttachmentExists},
	{maps.ErrTaken, CodeAddressTaken},
	{maps.ErrFull, cnitypes.ErrTryAgainLater},
	{loader.ErrNotLoaded, cnitypes.ErrTryAgainLater},
	{loader.ErrIncompatible, CodeIncompatible},
	{loader.ErrNotSupported, CodeNotSupported},
	{link.ErrNoIPv6, CodeNotSupported},
	{link.ErrNoNetkit, CodeNotSupported},
	{unix.ENOTDIR, cnitypes.ErrIOFailure},
	{unix.EROFS, cnitypes.ErrIOFailure},
	{unix.ENOSPC, cnitypes.ErrIOFailure},
}

// WithCode returns err as a cnitypes.Error with the code of its cause. An error that has a code
// keeps it; nil stays nil.
func WithCode(err error) error {
	var coded *cnitypes.Error
	if err == nil || errors.As(err, &coded) {
		return err
	}
	if taken, ok := errors.AsType[*maps.TakenError](err); ok && taken.IsPort {
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

// WithDetails appends a second error to the details of an error that has a code.
func WithDetails(err, second error) error {
	var coded *cnitypes.Error
	if second == nil || !errors.As(err, &coded) {
		return err
	}
	return cnitypes.NewError(coded.Code, coded.Msg, strings.TrimPrefix(coded.Details+"; "+second.Error(), "; "))
}

// WithPrefix prefixes the message of an error that has a code.
func WithPrefix(err error, prefix string) error {
	var coded *cnitypes.Error
	if !errors.As(err, &coded) {
		return err
	}
	return cnitypes.NewError(coded.Code, prefix+coded.Msg, coded.Details)
}

// Invalid reports a key of the configuration with the value it has and what was expected.
func Invalid(key string, value any, expected string) error {
	return cnitypes.NewError(cnitypes.ErrInvalidNetworkConfig, fmt.Sprintf("%s %s: expected %s", key, show.Value(value), expected), "")
}

// InvalidAt reports what is wrong at a place of the configuration whose value alone does not tell.
func InvalidAt(place, why string) error {
	return cnitypes.NewError(cnitypes.ErrInvalidNetworkConfig, place+": "+why, "")
}

// Unsupported reports a key or value that ebpfnet does not support.
func Unsupported(key string, value any, why string) error {
	return cnitypes.NewError(cnitypes.ErrUnsupportedField, fmt.Sprintf("%s %s: %s", key, show.Value(value), why), "")
}

// InvalidEnv reports a CNI_ variable of the environment.
func InvalidEnv(variable string, value any, expected string) error {
	return cnitypes.NewError(cnitypes.ErrInvalidEnvironmentVariables, fmt.Sprintf("%s %s: expected %s", variable, show.Value(value), expected), "")
}

// InvalidNetns reports the container's network namespace, CNI_NETNS.
func InvalidNetns(path, why string) error {
	return cnitypes.NewError(cnitypes.ErrInvalidNetNS, fmt.Sprintf("CNI_NETNS %s: expected a container's network namespace: %s", show.Value(path), why), "")
}

// Shown returns an error as it leaves the process: in one line, printable and not too long.
func Shown(err *cnitypes.Error) *cnitypes.Error {
	return cnitypes.NewError(err.Code, show.Message(err.Msg), show.Message(err.Details))
}

// NotAvailable reports, for STATUS, why an ADD would fail now.
func NotAvailable(err error) error {
	return cnitypes.NewError(cnitypes.ErrPluginNotAvailable, err.Error(), "")
}
