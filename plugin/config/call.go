package config

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// Call is one call of a CNI command: the variables of the environment, and the keys of the
// configuration on stdin. Each method parses the keys that its command needs.
type Call struct {
	*skel.CmdArgs
	keys map[string]json.RawMessage

	foreign, ignored []string // see checkKeys
}

// NewCall decodes stdin. If that fails, the Call has no keys.
func NewCall(args *skel.CmdArgs) (*Call, error) {
	call := &Call{CmdArgs: args}
	err := json.Unmarshal(args.StdinData, &call.keys)
	if _, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return call, cnierr.Invalid("configuration", json.RawMessage(args.StdinData), "an object")
	}
	if err != nil {
		return call, cnitypes.NewError(cnitypes.ErrDecodingFailure, "decode the network configuration: "+err.Error(), "")
	}
	return call, nil
}

// CNIVersion returns the version that the configuration names, or "".
func (c *Call) CNIVersion() string { return c.text("cniVersion") }

// Network returns the name of the network, or "".
func (c *Call) Network() string { return c.text("name") }

// text returns a string of the configuration, or "" where the key is missing or has another type.
func (c *Call) text(key string) (text string) {
	_ = json.Unmarshal(c.keys[key], &text)
	return text
}

// decode fills the fields of a struct from the keys that their json tags name.
func (c *Call) decode(conf any) error {
	value := reflect.ValueOf(conf).Elem()
	for _, field := range reflect.VisibleFields(value.Type()) {
		key := field.Tag.Get("json")
		text, ok := c.keys[key]
		if !ok || key == "" { // an embedded struct has no key
			continue
		}
		if err := json.Unmarshal(text, value.FieldByIndex(field.Index).Addr().Interface()); err != nil {
			return invalidType(key, text, err)
		}
	}
	return nil
}

// invalidType reports the place within a key whose value has the wrong type.
func invalidType(key string, text json.RawMessage, err error) error {
	wrong, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return cnierr.Invalid(key, text, err.Error())
	}
	place := strings.TrimSuffix(key+"."+wrong.Field, ".")
	return cnierr.Invalid(place, valueAt(text, wrong.Field), describe(wrong.Type))
}

// valueAt returns the value at a path of keys, or what encloses it: such a path does not name the
// element of a list.
func valueAt(text json.RawMessage, path string) json.RawMessage {
	for key := range strings.SplitSeq(path, ".") {
		var object map[string]json.RawMessage
		if json.Unmarshal(text, &object) != nil {
			break
		}
		next, ok := object[key]
		if !ok {
			break
		}
		text = next
	}
	return text
}

func describe(t reflect.Type) string {
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
		return describe(t.Elem())
	default:
		return "an object"
	}
}
