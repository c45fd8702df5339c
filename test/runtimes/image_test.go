package runtimes

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"runtime"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// image is the name of the image that all pods have. It is busybox and a web page, and waits for its end.
const image = "test.local/busybox:1"

type file struct {
	name    string
	content []byte
}

// ociImage returns the archive of the image.
func ociImage(t *testing.T) []byte {
	t.Helper()
	busybox := testenv.ReadFile(t, "/bin/busybox")
	files := []file{{"oci-layout", []byte(`{"imageLayoutVersion": "1.0.0"}`)}}
	// add adds a blob and returns its descriptor.
	add := func(kind string, content []byte) map[string]any {
		digest := fmt.Sprintf("%x", sha256.Sum256(content))
		files = append(files, file{"blobs/sha256/" + digest, content})
		return map[string]any{"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + digest, "size": len(content)}
	}
	layer := add("layer.v1.tar", archive(t, file{"bin/busybox", busybox}, file{"www/index.html", []byte("hello")}))
	config := add("config.v1+json", encode(t, map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		// The first process of a container ignores SIGTERM.
		"config": map[string]any{"Cmd": []string{"/bin/busybox", "tail", "-f", "/dev/null"}, "StopSignal": "SIGKILL"},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []any{layer["digest"]}},
	}))
	manifest := add("manifest.v1+json", encode(t, map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": []any{layer},
	}))
	manifest["annotations"] = map[string]string{"io.containerd.image.name": image, "org.opencontainers.image.ref.name": image}
	files = append(files, file{"index.json", encode(t, map[string]any{"schemaVersion": 2, "manifests": []any{manifest}})})
	return archive(t, files...)
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	content, err := json.Marshal(v)
	testenv.Must(t, err)
	return content
}

func archive(t *testing.T, files ...file) []byte {
	t.Helper()
	var buffer bytes.Buffer
	writer := tar.NewWriter(&buffer)
	for _, file := range files {
		testenv.Must(t, writer.WriteHeader(&tar.Header{Name: file.name, Mode: 0o755, Size: int64(len(file.content))}))
		if _, err := writer.Write(file.content); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Must(t, writer.Close())
	return buffer.Bytes()
}
