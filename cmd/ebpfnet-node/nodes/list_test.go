package nodes

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/wanted"
)

// encoded returns a list as the API sends it.
func encoded(t *testing.T, list *corev1.NodeList) []byte {
	t.Helper()
	raw, err := list.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	unknown := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, Raw: raw}
	message, err := unknown.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte(envelope), message...)
}

// TestReadList reads a list, and none that is not whole: nodes that it lacks would be taken out of the host.
func TestReadList(t *testing.T) {
	first, second := fullNode("a", "10.244.1.0/24"), fullNode("b", "10.244.2.0/24", "fd44:2::/64")
	list := &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: "more"}, Items: []corev1.Node{*first, *second}}
	whole := encoded(t, list)
	const numbers = "\x28\x96\x01" + "\x35abcd" + "\x39abcdefgh" // of fields that a later API may have
	got, err := readList(strings.NewReader(string(whole) + numbers))
	if err != nil {
		t.Fatal(err)
	}
	want := []wanted.Node{wantedNode("a", "10.244.1.0/24"), wantedNode("b", "10.244.2.0/24", "fd44:2::/64")}
	if len(got.Items) != len(want) || !reflect.DeepEqual(got.Items[0].node, want[0]) || !reflect.DeepEqual(got.Items[1].node, want[1]) {
		t.Errorf("got %+v, want %+v", got.Items, want)
	}
	if got.ResourceVersion != "7" || got.Continue != "more" {
		t.Errorf("got version %q, continue %q, want those of the list", got.ResourceVersion, got.Continue)
	}

	end := bytes.LastIndex(whole, []byte("image-49")) // of the last node, before the envelope's own end
	for cut := range end {
		if _, err := readList(bytes.NewReader(whole[:cut])); err == nil {
			t.Fatalf("got no error for the first %d bytes of %d", cut, len(whole))
		}
	}
	for name, bad := range map[string][]byte{
		"no protobuf":      []byte(`{"kind": "NodeList"}`),
		"no list":          []byte(envelope),
		"no version":       encoded(t, &corev1.NodeList{Items: list.Items}),
		"numbers alone":    []byte(envelope + numbers),
		"half a number":    append(bytes.Clone(whole), "\x35abc"...),
		"a group":          append(bytes.Clone(whole), "\x33"...),
		"a field too long": []byte(envelope + "\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x"),
	} {
		if _, err := readList(bytes.NewReader(bad)); err == nil {
			t.Errorf("%s: got no error", name)
		} else if strings.Contains(err.Error(), "%!") {
			t.Errorf("%s: got a broken text: %v", name, err)
		}
	}
}
