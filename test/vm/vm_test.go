package main

import (
	"bytes"
	"errors"
	"testing"
)

func TestNewestRelease(t *testing.T) {
	packages := []string{
		"linux-image-6.1-amd64", // refers to the newest one
		"linux-image-6.1.0-9-amd64",
		"linux-image-6.1.0-56-amd64",
		"linux-image-6.1.0-57-cloud-amd64",
		"linux-image-6.1.0-57-amd64-dbg",
		"linux-image-6.1.0-0.deb11.58-amd64",
		"linux-image-6.12.90+deb13.1-amd64",
		"linux-image-6.12.117+deb13-amd64",
		"linux-image-6.12.118+deb13-rt-amd64",
		"linux-image-7.1.13+deb13-amd64",
		"linux-image-7.2.6+deb13-amd64",
		"linux-headers-7.3.0+deb13-amd64",
	}
	for series, want := range map[string]string{
		"6.1":  "6.1.0-56-amd64",
		"6.12": "6.12.117+deb13-amd64",
		"7":    "7.2.6+deb13-amd64",
		"5.10": "",
	} {
		got, err := kernel{series: series, flavour: "amd64"}.newestRelease(packages)
		if got != want || (err != nil) != (want == "") {
			t.Errorf("%s: got %q and error %v, want %q", series, got, err, want)
		}
	}
}

func TestRelayOutputNeedsWholeExit(t *testing.T) {
	var wire bytes.Buffer
	w := &frameWriter{w: &wire}
	if err := errors.Join(w.send(frameReady, nil), w.send(frameExit, []byte{7})); err != nil {
		t.Fatal(err)
	}
	all := wire.Bytes()
	if status, err := relayOutput(bytes.NewReader(all)); status != 7 || err != nil {
		t.Errorf("got status %d and error %v, want 7", status, err)
	}
	for n := range all {
		if status, err := relayOutput(bytes.NewReader(all[:n])); err == nil {
			t.Errorf("a guest that died after %d of %d bytes has status %d", n, len(all), status)
		}
	}
}
