package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Document prints one thing that is no list: what text prints, or the value for programs, or its name.
func (p *Printer) Document(value any, name string, text func()) error {
	switch p.Format {
	case JSON, YAML:
		return p.Value(value)
	case Name:
		p.Printf("%s\n", name)
	default:
		text()
	}
	return nil
}

// Value prints a value for programs, as JSON or YAML. The fields' names are those of its JSON.
func (p *Printer) Value(value any) error {
	text, err := json.MarshalIndent(notNil(value), "", "  ")
	if err == nil && p.Format == YAML {
		text, err = yamlOf(text)
	}
	if err != nil {
		return err
	}
	_, err = p.to.Write(append(show.JSON(bytes.TrimRight(text, "\n")), '\n'))
	return err
}

// Line prints a value as one line of JSON, for a command that prints one after another.
func (p *Printer) Line(value any) error {
	if p.Format == YAML {
		p.Printf("---\n")
		return p.Value(value)
	}
	text, err := json.Marshal(value)
	if err == nil {
		_, err = p.to.Write(append(show.JSON(text), '\n'))
	}
	return err
}

// notNil returns an empty list for a nil one: programs iterate over it.
func notNil(value any) any {
	if v := reflect.ValueOf(value); v.Kind() == reflect.Slice && v.IsNil() {
		return []struct{}{}
	}
	return value
}

// yamlOf writes JSON as YAML in the same order. What show.JSON escapes afterwards is in double quotes,
// where YAML has the same escapes.
func yamlOf(text []byte) ([]byte, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(escape(text), &document); err != nil {
		return nil, err
	}
	restyle(&document)
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	err := encoder.Encode(&document)
	return out.Bytes(), err
}

// escape escapes what JSON may contain as it is, and YAML may not. YAML knows no pairs of surrogates.
func escape(text []byte) (escaped []byte) {
	for _, r := range string(text) {
		if r != '\n' && r <= 0xffff && !strconv.IsPrint(r) {
			escaped = fmt.Appendf(escaped, `\u%04x`, r)
			continue
		}
		escaped = utf8.AppendRune(escaped, r)
	}
	return escaped
}

func restyle(node *yaml.Node) {
	isHidden := func(r rune) bool { return !strconv.IsPrint(r) }
	switch {
	case node.Kind != yaml.ScalarNode && len(node.Content) > 0:
		node.Style = 0
	case node.Kind == yaml.ScalarNode && !strings.ContainsFunc(node.Value, isHidden):
		node.Style = 0
	}
	for _, inner := range node.Content {
		restyle(inner)
	}
}
