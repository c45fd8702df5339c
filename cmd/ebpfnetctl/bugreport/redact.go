package bugreport

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// leftOut stands for a secret.
const leftOut = "(left out)"

// secretName matches names of what others must not know.
var secretName = regexp.MustCompile(`(?i)pass(word|wd|phrase|code)|secret|token|credential|(^|[-_. ])auth|auth$|psk|bearer|cookie|private|signature|key([-_]?data)?$`)

// secretText matches what is a secret wherever it is, and what follows the name of one.
var secretText = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]+-----.*?(-----END [A-Z0-9 ]+-----|$)`), leftOut},
	{regexp.MustCompile(`\bLS0tLS1CRUdJTi[\w+/=]*`), leftOut},       // the same in base64
	{regexp.MustCompile(`\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*`), leftOut}, // a JSON Web Token
	{regexp.MustCompile(`(\w://)[^/@\s"]+@`), "${1}" + leftOut + "@"},
	{regexp.MustCompile(`(?i)\b(authorization\W+\w+|bearer) +[^\s"']+`), "${1} " + leftOut},
	{regexp.MustCompile(`(?i)([\w-]*(?:pass(?:word|wd|phrase)|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|psk)["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;&"']+)`), "${1}" + leftOut},
}

// redactText leaves out secrets, and makes text fit for a terminal.
func redactText(text []byte) []byte {
	clean := redactString(string(text))
	lines := strings.Split(clean, "\n")
	for i, line := range lines {
		words := strings.Split(line, "\t")
		for j := range words {
			words[j] = show.Text(words[j])
		}
		lines[i] = strings.Join(words, "\t")
	}
	return []byte(strings.Join(lines, "\n"))
}

func redactString(text string) string {
	for _, secret := range secretText {
		text = secret.pattern.ReplaceAllString(text, secret.with)
	}
	return text
}

// redactJSON leaves out the values of secrets. What is no JSON is left out as a whole, because nobody knows what a
// name and what a value is there. Of a list, the first entries are kept that there is room for; it is never in memory
// as a whole.
func redactJSON(from io.Reader, room int) (text []byte, err error) {
	in := bufio.NewReader(from)
	decoder := json.NewDecoder(in)
	decoder.UseNumber()
	if first, _ := in.Peek(1); string(first) == "[" {
		return redactList(decoder, room)
	}
	text, err = redactNext(decoder, "")
	switch {
	case err != nil:
		return nil, err
	case decoder.More():
		return nil, errors.New("left out: not JSON: more than one value")
	case len(text) > room:
		return nil, fmt.Errorf("left out: it has %d bytes, and there is room for %d", len(text), room)
	}
	return text, nil
}

// redactList returns the entries that it could read, also with an error.
func redactList(decoder *json.Decoder, room int) (text []byte, err error) {
	const end = "\n]\n"

	kept, entries := 0, 0
	for _, err = decoder.Token(); err == nil && decoder.More(); entries++ {
		if kept < entries {
			err = decoder.Decode(&json.RawMessage{})
			continue
		}
		var entry []byte
		entry, err = redactNext(decoder, "  ")
		entry = append([]byte(",\n  "), bytes.TrimSpace(entry)...)
		if err == nil && len(text)+len(entry)+len(end) <= room {
			text = append(text, entry...)
			kept++
		}
	}
	switch {
	case err == nil && entries == 0:
		return []byte("[]\n"), nil
	case err == nil && kept < entries:
		err = fmt.Errorf("cut: the first %d of %d entries are here", kept, entries)
	case err != nil && kept > 0:
		err = fmt.Errorf("cut: the first %d entries are here: %w", kept, err)
	}
	if kept > 0 {
		text = append(text, end...)
		text[0] = '[' // instead of a comma
	}
	return text, err
}

// redactNext reads the next value, all but the first of its lines behind prefix.
func redactNext(decoder *json.Decoder, prefix string) ([]byte, error) {
	var value any
	if err := decoder.Decode(&value); err != nil {
		return nil, fmt.Errorf("left out: not JSON: %w", err)
	}
	return marshal(redactValue(value), prefix)
}

func marshal(value any, prefix string) ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent(prefix, "  ")
	err := encoder.Encode(value)
	return show.JSON(text.Bytes()), err
}

func redactValue(value any) any {
	switch v := value.(type) {
	case map[string]any:
		named := isSecretPair(v)
		for name, inner := range v {
			if named && name == "value" || isSecret(name, v) {
				v[name] = leftOut
			} else {
				v[name] = redactValue(inner)
			}
		}
	case []any:
		for i := range v {
			v[i] = redactValue(v[i])
		}
	case string:
		return redactString(v)
	}
	return value
}

// isSecret returns whether a member of an object is a secret by its name. The key of a label, or of an entry of a map,
// is none.
func isSecret(name string, object map[string]any) bool {
	if _, isPair := object["value"]; isPair && name == "key" {
		return false
	}
	return secretName.MatchString(name)
}

// isSecretPair is for lists of variables and of labels: an object names a secret, and its "value" is it.
func isSecretPair(object map[string]any) bool {
	for _, member := range []string{"name", "key"} {
		if name, ok := object[member].(string); ok && secretName.MatchString(name) {
			return true
		}
	}
	return false
}
