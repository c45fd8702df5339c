package plugin

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"

	cnitypes "github.com/containernetworking/cni/pkg/types"
)

// knownKeys are those of the specification and ours. Any other is refused,
// since a misspelt ipMasq would be a network that works by half.
var knownKeys = []string{
	"cniVersion", "name", "type", "disableCheck", "disableGC", "capabilities", "args", "runtimeConfig",
	"prevResult", "ipMasq", "ipMasq4", "ipMasq6", "nonMasqueradeCIDRs", "maxFlows", "mtu", "ipam", "dns",
	"sysctl", "promisc", "allmulti", "txQLen", "dataDir", "device", "fastPath", "bigTCP", "logFile", "logLevel", "uplinks",
	"antiSpoof", "ingressPolicy", "ingressRate", "ingressBurst", "egressRate", "egressBurst", "unshapedSubnets",
}

// decodeInto tells broken JSON from a value of the wrong type, and names its key.
func decodeInto(stdin []byte, conf any) error {
	err := json.Unmarshal(stdin, conf)
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) {
		return invalid(wrongType.Field, valueAt(stdin, wrongType.Field), kindOf(wrongType.Type))
	}
	if err != nil {
		return cnitypes.NewError(cnitypes.ErrDecodingFailure, "decode the network configuration: "+err.Error(), "")
	}
	return nil
}

// valueAt returns what stands at a path of keys, or as much of it as there is:
// the path does not say which element of a list it goes by.
func valueAt(stdin []byte, path string) json.RawMessage {
	value := json.RawMessage(stdin)
	for key := range strings.SplitSeq(path, ".") {
		var object map[string]json.RawMessage
		if json.Unmarshal(value, &object) != nil {
			break
		}
		next, found := object[key]
		if !found {
			break
		}
		value = next
	}
	return value
}

// kindOf says in words what a value should have been.
func kindOf(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.String:
		return "a string"
	case reflect.Slice:
		return "a list"
	case reflect.Pointer:
		return kindOf(t.Elem())
	default:
		return "an object"
	}
}

// checkKeys lets keys with a dot or slash pass: they belong to somebody, as
// cni.dev/attachments does.
func checkKeys(stdin []byte) error {
	var all map[string]json.RawMessage
	if err := decodeInto(stdin, &all); err != nil {
		return err
	}
	for key, value := range all {
		if strings.ContainsAny(key, "./") || slices.Contains(knownKeys, key) {
			continue
		}
		return unsupported(key, value, "no such key; ebpfnet knows "+strings.Join(knownKeys, ", "))
	}
	return nil
}
