package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// These functions read JSON by its places. Unlike encoding/json they refuse unknown and repeated keys,
// other cases of known ones, and null: an omission must not admit more than the policy's author meant.

// object returns the values of an object by key. The text is valid JSON.
func object(place string, text json.RawMessage, known ...string) (map[string]json.RawMessage, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	if first, err := decoder.Token(); err != nil || first != json.Delim('{') {
		return nil, cnierr.Invalid(place, text, "an object")
	}
	values := map[string]json.RawMessage{}
	for decoder.More() {
		var value json.RawMessage
		token, errKey := decoder.Token()
		if err := errors.Join(errKey, decoder.Decode(&value)); err != nil {
			return nil, cnierr.InvalidAt(place, err.Error())
		}
		key := fmt.Sprint(token)
		if !slices.Contains(known, key) {
			return nil, cnierr.Unsupported(place+"."+key, value, "no such key; expected one of "+strings.Join(known, ", "))
		}
		if values[key] != nil {
			return nil, cnierr.InvalidAt(place+"."+key, "the key is there twice")
		}
		values[key] = value
	}
	return values, nil
}

// list parses the elements of a list. Without one the result is nil, and otherwise not.
func list[T any](place string, text json.RawMessage, parse func(place string, text json.RawMessage) (T, error)) ([]T, error) {
	if text == nil {
		return nil, nil
	}
	var texts []json.RawMessage
	if err := json.Unmarshal(text, &texts); err != nil || texts == nil {
		return nil, cnierr.Invalid(place, text, "a list")
	}
	parsed := make([]T, len(texts))
	for i, text := range texts {
		var err error
		if parsed[i], err = parse(fmt.Sprintf("%s[%d]", place, i), text); err != nil {
			return nil, err
		}
	}
	return parsed, nil
}

func boolean(place string, text json.RawMessage, byDefault bool) (bool, error) {
	switch string(text) {
	case "":
		return byDefault, nil
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, cnierr.Invalid(place, text, "true or false")
}

func stringOf(place string, text json.RawMessage) (string, error) {
	var value *string
	if err := json.Unmarshal(text, &value); err != nil || value == nil {
		return "", cnierr.Invalid(place, text, "a string")
	}
	return *value, nil
}
