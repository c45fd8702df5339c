package cni

import (
	"fmt"
	"io"
	"net"
	"net/netip"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"
)

// PrintResult prints a result (SPEC, section 5) in a version. The library does not distinguish
// 1.0.0 from 1.1.0, which introduced mtu.
func PrintResult(to io.Writer, result *types100.Result, version string) error {
	if hasMTU, err := cniversion.GreaterThanOrEqualTo(version, "1.1.0"); err == nil && !hasMTU {
		for _, device := range result.Interfaces {
			device.Mtu = 0
		}
	}
	converted, err := result.GetAsVersion(version)
	if err != nil {
		return cnitypes.NewError(cnitypes.ErrIncompatibleCNIVersion, fmt.Sprintf("cniVersion %q: %v", version, err), "")
	}
	if err := converted.PrintTo(to); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

// IPConfig returns an address as a result has it.
func IPConfig(prefix netip.Prefix, gateway netip.Addr) *types100.IPConfig {
	return &types100.IPConfig{
		Address: net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())},
		Gateway: gateway.AsSlice(),
	}
}
