package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// layOut prints JSON with one line for each element of what the outer object holds:
// short enough to read at a glance.
func layOut(raw []byte) string {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(raw, &object); err != nil {
		return string(raw)
	}
	var out strings.Builder
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.Token()
	for decoder.More() { // for the keys in their order
		key, _ := decoder.Token()
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return string(raw)
		}
		if out.Len() > 0 {
			out.WriteString(",\n")
		}
		fmt.Fprintf(&out, "  %q: ", key)
		var list []json.RawMessage
		if json.Unmarshal(value, &list) != nil || len(list) == 0 {
			out.WriteString(compact(value))
			continue
		}
		elements := make([]string, 0, len(list))
		for _, element := range list {
			elements = append(elements, compact(element))
		}
		out.WriteString("[" + strings.Join(elements, ",\n    ") + "]")
	}
	return "{\n" + out.String() + "\n}"
}

func compact(raw []byte) string {
	var out bytes.Buffer
	if err := json.Compact(&out, raw); err != nil {
		return string(raw)
	}
	return out.String()
}

// words says each thing in words, in a steady order.
func words[T fmt.Stringer](things []T) []string {
	var list []string
	for _, thing := range things {
		list = append(list, thing.String())
	}
	slices.Sort(list)
	return list
}

// andList is words for a sentence, in the order given.
func andList[T fmt.Stringer](things []T) string {
	var list []string
	for _, thing := range things {
		list = append(list, thing.String())
	}
	return strings.Join(list, " and ")
}

// breakUp joins sentences, so many to a line.
func breakUp(list []string, perLine int) string {
	var lines []string
	for chunk := range slices.Chunk(list, perLine) {
		lines = append(lines, strings.Join(chunk, "; "))
	}
	return strings.Join(lines, ";\n")
}
