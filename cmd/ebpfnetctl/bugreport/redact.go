package bugreport

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
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
// name and what a value is there.
func redactJSON(text []byte) ([]byte, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if decoder.More() {
		return nil, errors.New("not JSON: more than one value")
	}
	return marshal(redactValue(value))
}

func marshal(value any) ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
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
