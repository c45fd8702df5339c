package testenv

import (
	"testing"
)

func TestFeatures(t *testing.T) {
	for _, feature := range []Feature{TCX, RedirectPeer, BigTCP4, BigTCP6, Netkit, FQ, SCTP} {
		t.Run(feature.Name, func(t *testing.T) { Require(t, feature) })
	}
}

func TestFeatureMustBeIn(t *testing.T) {
	for _, tc := range []struct {
		since, kernel string
		want          bool
	}{
		{"6.6", "6.6.1-generic", true},
		{"6.6", "6.5.9", false},
		{"6.6", "6.12", true},
		{"6.6", "7.0", true},
		{"6.6", "5.10.0-30-cloud-amd64", false},
		{"0.0", "6.6", false},
	} {
		since, err := parseVersion(tc.since)
		if err != nil {
			t.Fatal(err)
		}
		kernel, err := parseVersion(tc.kernel)
		if err != nil {
			t.Fatal(err)
		}
		if got := (Feature{Since: since}).mustBeIn(kernel); got != tc.want {
			t.Errorf("since %s, kernel %s: %t", tc.since, tc.kernel, got)
		}
	}
	if _, err := parseVersion("linux"); err == nil {
		t.Error("a release without numbers was parsed")
	}
}
