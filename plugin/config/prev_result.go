package config

import (
	"encoding/json"
	"fmt"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// ParsePrevResult parses prevResult alone, for an IPAM plugin. It returns nil where there is none.
func (c *Call) ParsePrevResult() (*types100.Result, error) {
	var prev map[string]any
	text, ok := c.keys["prevResult"]
	if ok && json.Unmarshal(text, &prev) != nil {
		return nil, cnierr.Invalid("prevResult", text, "an object")
	}
	return parsePrevResult(c.CNIVersion(), prev)
}

// parsePrevResult parses the result of the previous plugin (for ADD) or of the last ADD (for
// CHECK). It returns nil where there is none.
func parsePrevResult(version string, prev map[string]any) (*types100.Result, error) {
	if prev == nil {
		return nil, nil
	}
	if place := findNull("prevResult", prev); place != "" { // the library would panic
		return nil, cnierr.Invalid(place, nil, "an object")
	}
	conf := cnitypes.PluginConf{CNIVersion: version, RawPrevResult: prev}
	err := cniversion.ParsePrevResult(&conf)
	var result *types100.Result
	if err == nil {
		result, err = types100.NewResultFromResult(conf.PrevResult)
	}
	if err != nil {
		return nil, cnierr.Invalid("prevResult", prev, "a result of version "+version+" ("+err.Error()+")")
	}
	return result, checkPrefixes(result)
}

// checkPrefixes refuses empty addresses and routes, which the library accepts.
func checkPrefixes(result *types100.Result) error {
	for i, ip := range result.IPs {
		if !link.PrefixOf(ip.Address).IsValid() {
			return cnierr.Invalid(fmt.Sprintf("prevResult.ips[%d].address", i), "", "an address, like 10.84.0.7/16")
		}
	}
	for i, route := range result.Routes {
		if !link.PrefixOf(route.Dst).IsValid() {
			return cnierr.Invalid(fmt.Sprintf("prevResult.routes[%d].dst", i), "", "a network, like 0.0.0.0/0")
		}
	}
	return nil
}

// findNull returns the place of a list element that is null, or "".
func findNull(place string, value any) string {
	switch value := value.(type) {
	case map[string]any:
		for key, inner := range value {
			if found := findNull(place+"."+key, inner); found != "" {
				return found
			}
		}
	case []any:
		for i, inner := range value {
			element := fmt.Sprintf("%s[%d]", place, i)
			if inner == nil {
				return element
			}
			if found := findNull(element, inner); found != "" {
				return found
			}
		}
	}
	return ""
}

// ResultHasInterfaces reports whether results of the configuration's version name interfaces. Those up
// to 0.2.0 have the addresses of CNI_IFNAME alone.
func (c *Config) ResultHasInterfaces() bool {
	has, err := cniversion.GreaterThanOrEqualTo(c.CNIVersion, "0.3.0")
	return has || err != nil
}

// InterfaceOf returns the index of the container's interface in a result, or -1.
func InterfaceOf(result *types100.Result, name string) int {
	return slices.IndexFunc(result.Interfaces, func(i *types100.Interface) bool {
		return i.Sandbox != "" && i.Name == name
	})
}
