package cluster

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// imageEnv names the image of a release, which `make test-packages` lets TestContainer run. Without it the test makes
// one that is like it.
const imageEnv = "EBPFNET_IMAGE"

// image is what a runtime takes from an image.
type image struct {
	files      map[string][]byte
	entrypoint []string
	env        []string
}

// agentImage returns the image of the manifests.
func agentImage(t *testing.T) image {
	t.Helper()
	if archive := os.Getenv(imageEnv); archive != "" {
		found, err := readImage(archive)
		if err != nil {
			t.Fatalf("image %s: %v", archive, err)
		}
		return found
	}
	files := map[string][]byte{}
	for _, name := range []string{"./cmd/ebpfnet", "./cmd/ebpfnet-ipam", "github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node"} {
		content := testenv.ReadFile(t, testenv.Build(t, name))
		files[filepath.Base(name)] = content
	}
	return image{files: files, entrypoint: []string{"/ebpfnet-node"}}
}

// blob is how documents of an OCI archive name each other.
type blob struct {
	Digest   string
	Platform struct{ Architecture string }
}

// readImage reads an OCI archive that has one image for several architectures.
func readImage(archive string) (image, error) {
	file, err := os.Open(archive)
	if err != nil {
		return image{}, err
	}
	defer file.Close()
	blobs, err := filesOf(file)
	if err != nil {
		return image{}, err
	}
	content := func(b blob) []byte { return blobs["blobs/"+strings.Replace(b.Digest, ":", "/", 1)] }
	var top, index struct{ Manifests []blob }
	if err := json.Unmarshal(blobs["index.json"], &top); err != nil || len(top.Manifests) != 1 {
		return image{}, fmt.Errorf("got %d images (%w), want one", len(top.Manifests), err)
	}
	if err := json.Unmarshal(content(top.Manifests[0]), &index); err != nil {
		return image{}, err
	}
	of := slices.IndexFunc(index.Manifests, func(b blob) bool { return b.Platform.Architecture == runtime.GOARCH })
	if of < 0 {
		return image{}, fmt.Errorf("got %+v, want one for %s", index, runtime.GOARCH)
	}
	var manifest struct {
		Config blob
		Layers []blob
	}
	if err := json.Unmarshal(content(index.Manifests[of]), &manifest); err != nil || len(manifest.Layers) != 1 {
		return image{}, fmt.Errorf("got %d layers (%w), want one", len(manifest.Layers), err)
	}
	var about struct {
		Config struct{ Entrypoint, Env []string }
	}
	if err := json.Unmarshal(content(manifest.Config), &about); err != nil {
		return image{}, err
	}
	layer, err := gzip.NewReader(bytes.NewReader(content(manifest.Layers[0])))
	if err != nil {
		return image{}, err
	}
	files, err := filesOf(layer)
	return image{files, about.Config.Entrypoint, about.Config.Env}, err
}

// filesOf reads the files of a tar archive.
func filesOf(archive io.Reader) (map[string][]byte, error) {
	files := map[string][]byte{}
	for reader := tar.NewReader(archive); ; {
		header, err := reader.Next()
		if err == io.EOF {
			return files, nil
		}
		if err == nil {
			files[header.Name], err = io.ReadAll(reader)
		}
		if err != nil {
			return nil, err
		}
	}
}
