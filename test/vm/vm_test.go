package main

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
)

func TestKernelList(t *testing.T) {
	kernels, err := parseKernels(kernelList)
	if err != nil {
		t.Fatal(err)
	}
	oldest, err := findKernel(kernels, "5.10")
	if err != nil {
		t.Fatal(err)
	}
	if want := (kernel{"5.10", "bullseye-security", "amd64"}); oldest != want {
		t.Errorf("5.10 is %v, want %v", oldest, want)
	}
	if _, err := findKernel(kernels, "5"); err == nil {
		t.Error("found a kernel by a prefix of its series")
	}
}

func TestParseKernelsRejects(t *testing.T) {
	for name, text := range map[string]string{
		"missing field":  "5.10 bullseye\n",
		"too many":       "5.10 bullseye amd64 more\n",
		"series twice":   "# a comment\n6.1 a amd64\n\n6.1 b amd64 # again\n",
		"comment inside": "6.1 a # amd64\n",
	} {
		if kernels, err := parseKernels(text); err == nil {
			t.Errorf("%s: got %v, want an error", name, kernels)
		}
	}
}

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

func TestMirrorOf(t *testing.T) {
	uris := "'http://other.example/dists/nodistro/InRelease' a 0 \n" +
		"'http://mirror.example/debian/dists/bookworm-updates/InRelease' b 0 \n" +
		"'http://mirror.example/debian/dists/bookworm/InRelease' c 0 \n" +
		"'http://mirror.example/debian/dists/bookworm/main/binary-amd64/Packages.xz' d 0 \n"
	if got, err := mirrorOf(uris, "bookworm"); err != nil || got != "http://mirror.example/debian" {
		t.Errorf("got %q and error %v", got, err)
	}
	if got, err := mirrorOf(uris, "bookworm-security"); err == nil {
		t.Errorf("got %q for a missing suite", got)
	}
}

func TestKeeps(t *testing.T) {
	const modules = "lib/modules/5.10.0-46-amd64/"
	for path, want := range map[string]bool{
		"boot/vmlinuz-5.10.0-46-amd64":               true,
		"share/doc/linux-image/copyright":            false,
		modules + "modules.builtin":                  true,
		modules + "kernel/net/sched/cls_bpf.ko":      true,
		modules + "kernel/sound/soundcore.ko":        false,
		modules + "kernel/drivers/gpu/drm/drm.ko":    false,
		modules + "kernel/drivers/net/veth.ko":       true,
		modules + "kernel/drivers/net/wireless/x.ko": false,
		modules + "kernel/drivers/virtio/virtio.ko":  true,
		modules + "kernel/drivers/net/ethernet/b.ko": false,
	} {
		if got := keeps(path); got != want {
			t.Errorf("%s: got %v, want %v", path, got, want)
		}
	}
}

func TestModuleClosure(t *testing.T) {
	index := &moduleIndex{files: map[string]string{}, needs: map[string][]string{}, builtin: map[string]bool{}}
	dep := "kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/fscache.ko\n" +
		"kernel/net/9p/9pnet.ko: kernel/lib/base-x.ko\n" +
		"kernel/fs/fscache.ko:\n" +
		"kernel/lib/base-x.ko:\n" +
		"kernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko kernel/lib/base-x.ko\n"
	if err := index.parseDep(strings.NewReader(dep)); err != nil {
		t.Fatal(err)
	}
	if err := index.parseBuiltin(strings.NewReader("kernel/fs/fuse/virtio-fs.ko\n")); err != nil {
		t.Fatal(err)
	}

	got, err := index.closure([]string{"9pnet_virtio", "virtio_fs", "9p", "base-x"})
	want := []string{
		"kernel/lib/base-x.ko", "kernel/net/9p/9pnet.ko", "kernel/net/9p/9pnet_virtio.ko.xz",
		"kernel/fs/fscache.ko", "kernel/fs/9p/9p.ko",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got  %q and error %v\nwant %q", got, err, want)
	}
	if got, err := index.closure([]string{"absent"}); err == nil {
		t.Errorf("got %q for a missing module", got)
	}
}

func TestCpio(t *testing.T) {
	var archive bytes.Buffer
	w := &cpioWriter{w: &archive}
	if err := w.file("ab", 0o755, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
	const zeros = "00000000"
	want := "070701" + "00000001" + "000081ed" + zeros + zeros + "00000001" + zeros + "00000005" +
		zeros + zeros + zeros + zeros + "00000003" + zeros + "ab\x00" + "\x00\x00\x00" +
		"hello\x00\x00\x00" +
		"070701" + "00000002" + zeros + zeros + zeros + "00000001" + zeros + zeros +
		zeros + zeros + zeros + zeros + "0000000b" + zeros + "TRAILER!!!\x00" + "\x00\x00\x00"
	if got := archive.String(); got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestFrames(t *testing.T) {
	var wire bytes.Buffer
	w := &frameWriter{w: &wire}
	long := strings.Repeat("x", maxFrameSize+1)
	if err := w.copyFrom(strings.NewReader(long), frameStdout); err != nil {
		t.Fatal(err)
	}
	if err := w.send(frameExit, []byte{7}); err != nil {
		t.Fatal(err)
	}

	for _, want := range []struct {
		kind    frameKind
		payload string
	}{{frameStdout, long[:maxFrameSize]}, {frameStdout, "x"}, {frameExit, "\x07"}} {
		kind, payload, err := readFrame(&wire)
		if err != nil || kind != want.kind || string(payload) != want.payload {
			t.Errorf("got %q with %d bytes and error %v, want %q with %d", kind, len(payload), err, want.kind, len(want.payload))
		}
	}
	if _, _, err := readFrame(&wire); err != io.EOF {
		t.Errorf("at the end: error %v, want io.EOF", err)
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
