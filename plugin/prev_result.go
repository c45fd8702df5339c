package plugin

import (
	"fmt"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"
)

// prevResult is that of the plugin before, for ADD, or that of the last ADD, for CHECK; nil where
// there is none.
func (c *netConf) prevResult() (*types100.Result, error) {
	if c.RawPrevResult == nil {
		return nil, nil
	}
	if place := nullIn("prevResult", c.RawPrevResult); place != "" { // the library falls over it
		return nil, invalid(place, nil, "an object")
	}
	conf := cnitypes.PluginConf{CNIVersion: c.CNIVersion, RawPrevResult: c.RawPrevResult}
	err := cniversion.ParsePrevResult(&conf)
	var result *types100.Result
	if err == nil {
		result, err = types100.NewResultFromResult(conf.PrevResult)
	}
	if err != nil {
		return nil, invalid("prevResult", c.RawPrevResult, "a result of version "+c.CNIVersion+" ("+err.Error()+")")
	}
	return result, checkNetworks(result)
}

// checkNetworks refuses what the library lets pass: addresses and routes that say nowhere.
func checkNetworks(result *types100.Result) error {
	for i, ip := range result.IPs {
		if !prefixOf(ip.Address).IsValid() {
			return invalid(fmt.Sprintf("prevResult.ips[%d].address", i), "", "an address, like 10.88.0.7/16")
		}
	}
	for i, route := range result.Routes {
		if !prefixOf(route.Dst).IsValid() {
			return invalid(fmt.Sprintf("prevResult.routes[%d].dst", i), "", "a network, like 0.0.0.0/0")
		}
	}
	return nil
}

// nullIn returns the place of an element of a list that is null, or "".
func nullIn(place string, value any) string {
	switch value := value.(type) {
	case map[string]any:
		for key, inner := range value {
			if found := nullIn(place+"."+key, inner); found != "" {
				return found
			}
		}
	case []any:
		for i, inner := range value {
			here := fmt.Sprintf("%s[%d]", place, i)
			if inner == nil {
				return here
			}
			if found := nullIn(here, inner); found != "" {
				return found
			}
		}
	}
	return ""
}
