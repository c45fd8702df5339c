package config

import (
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/maps"
)

func parseValid(t *testing.T, keys string) (*ValidAttachments, error) {
	t.Helper()
	call, err := NewCall(&skel.CmdArgs{StdinData: []byte(`{"name": "pods"` + keys + `}`)})
	if err != nil {
		t.Fatal(err)
	}
	return call.ParseValidAttachments()
}

func TestValidAttachments(t *testing.T) {
	const (
		current = `, "cni.dev/valid-attachments": `
		tagged  = `, "cni.dev/attachments": `
		a, b    = `{"containerID": "a", "ifname": "eth0"}`, `{"containerID": "b", "ifname": "eth0"}`
	)
	living := []maps.Attachment{{Network: "pods", ContainerID: "a", IfName: "eth0"}, {Network: "pods", ContainerID: "dead", IfName: "eth0"}}
	for _, test := range []struct {
		name, keys string
		listed     bool
		want       string // valid; without a list those that live are
	}{
		{"absent", "", false, "a dead"},
		{"null", current + `null`, false, "a dead"},
		{"both null", current + `null` + tagged + `null`, false, "a dead"},
		{"empty: none", current + `[]`, true, ""},
		{"empty, key of the tag", tagged + `[]`, true, ""},
		{"null and empty", current + `null` + tagged + `[]`, true, ""},
		{"list", current + `[` + a + `]`, true, "a"},
		{"list, key of the tag", tagged + `[` + a + `, ` + b + `]`, true, "a b"},
		{"both", current + `[` + a + `]` + tagged + `[` + b + `]`, true, "a b"},
		{"other interface", current + `[{"containerID": "a", "ifname": "net1"}]`, true, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			valid, err := parseValid(t, test.keys)
			if err != nil {
				t.Fatal(err)
			}
			if listed := valid != nil; listed != test.listed {
				t.Fatalf("listed: %v, want %v", listed, test.listed)
			}
			if valid == nil {
				valid = NewValidAttachments("pods", living)
			}
			var got []string
			for _, id := range []string{"a", "b", "dead"} {
				if valid.HasReservation(ipam.Attachment{ContainerID: id, IfName: "eth0"}) {
					got = append(got, id)
				}
				attachment := maps.Attachment{Network: "pods", ContainerID: id, IfName: "eth0"}
				if valid.Lacks(attachment) == slices.Contains(got, id) || valid.HasOwner(attachment.Owner()) != slices.Contains(got, id) {
					t.Errorf("the reservation of %s is valid and the attachment is not, or the reverse", id)
				}
			}
			if !slices.Equal(got, strings.Fields(test.want)) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// TestValidReservationOfContainer covers an old host-local, whose reservations name no interface.
func TestValidReservationOfContainer(t *testing.T) {
	valid, err := parseValid(t, `, "cni.dev/valid-attachments": [{"containerID": "a", "ifname": "eth0"}]`)
	if err != nil {
		t.Fatal(err)
	}
	if !valid.HasReservation(ipam.Attachment{ContainerID: "a"}) || valid.HasReservation(ipam.Attachment{ContainerID: "b"}) {
		t.Error("reservations without an interface are not found by their container")
	}
}

func TestValidAttachmentsErrors(t *testing.T) {
	for _, keys := range []string{
		`, "cni.dev/valid-attachments": {}`,
		`, "cni.dev/valid-attachments": "a"`,
		`, "cni.dev/valid-attachments": [], "cni.dev/attachments": [1]`,
	} {
		_, err := parseValid(t, keys)
		wantCode(t, err, cnitypes.ErrInvalidNetworkConfig, "cni.dev/")
	}
}
