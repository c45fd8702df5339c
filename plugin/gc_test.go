package plugin

import (
	"slices"
	"strings"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/maps"
)

func TestValidAttachments(t *testing.T) {
	const (
		current = `"cni.dev/valid-attachments": `
		tagged  = `"cni.dev/attachments": `
		a, b    = `{"containerID": "a", "ifname": "eth0"}`, `{"containerID": "b", "ifname": "eth0"}`
	)
	living := []maps.Attachment{{Network: "pods", ContainerID: "a", IfName: "eth0"}, {Network: "pods", ContainerID: "dead", IfName: "eth0"}}
	for _, test := range []struct{ name, stdin, want string }{
		{"absent: those that live", `{}`, "a dead"},
		{"null", `{` + current + `null}`, "a dead"},
		{"both null", `{` + current + `null, ` + tagged + `null}`, "a dead"},
		{"empty: none", `{` + current + `[]}`, ""},
		{"empty, key of the tag", `{` + tagged + `[]}`, ""},
		{"null and empty", `{` + current + `null, ` + tagged + `[]}`, ""},
		{"list", `{` + current + `[` + a + `]}`, "a"},
		{"list, key of the tag", `{` + tagged + `[` + a + `, ` + b + `]}`, "a b"},
		{"both", `{` + current + `[` + a + `], ` + tagged + `[` + b + `]}`, "a b"},
		{"other interface", `{` + current + `[{"containerID": "a", "ifname": "net1"}]}`, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			valid, err := validAttachments([]byte(test.stdin), "pods", living)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, id := range []string{"a", "b", "dead"} {
				if valid.has(ipam.Attachment{ContainerID: id, IfName: "eth0"}) {
					got = append(got, id)
				}
			}
			if !slices.Equal(got, strings.Fields(test.want)) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestValidAttachmentsErrors(t *testing.T) {
	for _, stdin := range []string{
		`{"cni.dev/valid-attachments": {}}`,
		`{"cni.dev/valid-attachments": "a"}`,
		`{"cni.dev/valid-attachments": [], "cni.dev/attachments": [1]}`,
	} {
		_, err := validAttachments([]byte(stdin), "pods", nil)
		wantCode(t, err, cnitypes.ErrInvalidNetworkConfig, "cni.dev/")
	}
}
