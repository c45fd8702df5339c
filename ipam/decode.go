package ipam

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Keys are the keys of an "ipam" section, and RangeKeys those of a range in its "ranges".
var (
	RangeKeys = []string{"subnet", "rangeStart", "rangeEnd", "gateway"}
	Keys      = append([]string{"type", "dataDir", "resolvConf", "routes", "ranges"}, RangeKeys...)
)

// The raw types keep each value as text, to decode it separately and name its key in an
// error.

type rawSection struct {
	rawRange   // the legacy single range
	DataDir    json.RawMessage
	ResolvConf json.RawMessage
	Routes     json.RawMessage
	Ranges     json.RawMessage
}

type rawRange struct {
	Subnet     json.RawMessage
	RangeStart json.RawMessage
	RangeEnd   json.RawMessage
	Gateway    json.RawMessage
}

// decode returns the zero value if the key is absent or null, as host-local does.
func decode[T any](key string, raw json.RawMessage, expected string) (T, error) {
	var value T
	if !present(raw) {
		return value, nil
	}
	if err := json.Unmarshal(raw, &value); err != nil {
		return value, configErrorf(key, raw, "expected %s", expected)
	}
	return value, nil
}

func present(raw json.RawMessage) bool {
	return len(raw) > 0 && string(raw) != "null"
}

// decodeAddr returns the zero Addr if the key is absent, null or "".
func decodeAddr(key string, raw json.RawMessage) (netip.Addr, error) {
	text, err := decode[string](key, raw, "an IP address")
	if err != nil || text == "" {
		return netip.Addr{}, err
	}
	addr, err := parseAddr(text)
	if err != nil {
		return netip.Addr{}, configErrorf(key, raw, "expected an IP address")
	}
	return addr, nil
}

// parseAddr accepts what net.ParseIP accepts: an IPv4-mapped IPv6 address is IPv4, and a
// zone is an error.
func parseAddr(text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Addr{}, err
	}
	if addr.Zone() != "" {
		return netip.Addr{}, errors.New("zone not allowed")
	}
	return addr.Unmap(), nil
}

func parseRoutes(key string, raw json.RawMessage) ([]*types.Route, error) {
	elements, err := decode[[]json.RawMessage](key, raw, "a list of routes")
	if err != nil {
		return nil, err
	}
	var routes []*types.Route
	for i, element := range elements {
		key := fmt.Sprintf("%s[%d]", key, i)
		route := &types.Route{}
		if err := json.Unmarshal(element, route); err != nil {
			return nil, configErrorf(key, element, "%v", err)
		}
		if route.Dst.IP == nil {
			return nil, configErrorf(key, element, `expected a "dst" such as 0.0.0.0/0`)
		}
		routes = append(routes, route)
	}
	return routes, nil
}

// configErrorf returns the error "invalid configuration: key value: expectation".
func configErrorf(key string, value json.RawMessage, format string, args ...any) error {
	return fmt.Errorf("%w: %s %s: %s", ErrConfig, key, show.Short(string(bytes.Join(bytes.Fields(value), []byte(" ")))), fmt.Sprintf(format, args...))
}

func quote(text string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf("%q", text))
}
