package main

import (
	"fmt"
	"strings"
	"testing"
)

// TestReadObjects reads what kubectl apply does, and refuses other kinds, which it would leave out silently.
func TestReadObjects(t *testing.T) {
	const head = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: "
	for name, test := range map[string]struct{ text, want string }{
		"one":      {head + "{name: a}", "default/a"},
		"two":      {"---\n# nothing\n---\n" + head + "{name: a, namespace: shop}\n---\n" + head + "{name: b}\n", "shop/a default/b"},
		"JSON":     {`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "a"}}`, "default/a"},
		"none":     {"", "there is no NetworkPolicy"},
		"a kind":   {"apiVersion: v1\nkind: Pod\nmetadata: {name: a}", "got v1 Pod, want networking.k8s.io/v1 NetworkPolicy"},
		"not YAML": {"{", "error"},
	} {
		all, err := readObjects(test.text)
		got := []string{}
		for _, object := range all {
			got = append(got, object.Namespace+"/"+object.Name)
		}
		if err != nil {
			got = []string{fmt.Sprint("error: ", err)}
		}
		if text := strings.Join(got, " "); !strings.Contains(text, test.want) || err == nil && text != test.want {
			t.Errorf("%s: got %s, want %s", name, text, test.want)
		}
	}
}
