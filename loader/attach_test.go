package loader

import "testing"

// TestOwnerText has the digits that records, aliases and JSON have in common.
func TestOwnerText(t *testing.T) {
	for owner, want := range map[Owner]string{0: "0000000000000000", 0xff: "00000000000000ff", ^Owner(0): "ffffffffffffffff"} {
		if got := owner.String(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
