package bugreport

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"

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
	{regexp.MustCompile(`(?i)([\w-]*(?:pass(?:word|wd|phrase)|secret|token|api[-_]?key|access[-_]?key|private[-_]?key|fastopen[-_]?key|psk)["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;&"']+)`), "${1}" + leftOut},
}

var lineParts = regexp.MustCompile(`[^\n\t]+`)

// redactText leaves out secrets, and escapes control characters but the ends of lines and tabs.
func redactText(text []byte) []byte {
	return []byte(lineParts.ReplaceAllStringFunc(redactString(string(text)), show.Text))
}

func redactString(text string) string {
	for _, secret := range secretText {
		text = secret.pattern.ReplaceAllString(text, secret.with)
	}
	return text
}

func redactJSON(text []byte) ([]byte, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		return nil, fmt.Errorf("left out: not JSON: %w", err)
	}
	if decoder.More() {
		return nil, errors.New("left out: not JSON: more than one value")
	}
	var clean bytes.Buffer
	encoder := json.NewEncoder(&clean)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(redactValue(value))
	return show.JSON(clean.Bytes()), err
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

// isSecret reports whether a member of an object is a secret by its name. The "key" beside a "value" is a name.
func isSecret(name string, object map[string]any) bool {
	if _, isPair := object["value"]; isPair && name == "key" {
		return false
	}
	return secretName.MatchString(name)
}

// isSecretPair reports whether an object, such as a variable or a label, names a secret that is its "value".
func isSecretPair(object map[string]any) bool {
	for _, member := range []string{"name", "key"} {
		if name, ok := object[member].(string); ok && secretName.MatchString(name) {
			return true
		}
	}
	return false
}
