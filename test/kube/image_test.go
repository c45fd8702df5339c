package kube

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"runtime"
	"slices"
	"testing"
)

// Images of the cluster, made from programs built from their modules. No registry has them.
const (
	agentImage   = "ebpfnet.invalid/ebpfnet-node:test"
	agnhostImage = "ebpfnet.invalid/agnhost:test"
	pauseImage   = "ebpfnet.invalid/pause:test"
)

// image is a container image with one layer.
type image struct {
	name       string
	entrypoint []string
	files      map[string]string // path in the image → this host's file
	args       []string          // of a container that has none
}

// images are all that the cluster needs.
func images(t *testing.T) []image {
	t.Helper()
	return []image{
		{pauseImage, []string{"/pause"}, map[string]string{"pause": binary(t, "pause")}, nil},
		{agnhostImage, []string{"/agnhost"}, map[string]string{"agnhost": binary(t, "agnhost"), "bin/sh": busybox}, nil},
		{agentImage, []string{"/ebpfnet-node"}, map[string]string{
			"ebpfnet-node": binary(t, "ebpfnet-node"), "ebpfnet": binary(t, "ebpfnet"), "ebpfnet-ipam": binary(t, "ebpfnet-ipam"),
		}, nil},
	}
}

// archive is an OCI image layout in a tar file, in the making.
type archive struct {
	buffer bytes.Buffer
	tar    *tar.Writer
	blobs  map[string]bool // by their sums
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

const mediaTypes = "application/vnd.oci.image."

// layout returns an archive that `ctr images import` reads.
func layout(images []image) ([]byte, error) {
	a := &archive{blobs: map[string]bool{}}
	a.tar = tar.NewWriter(&a.buffer)
	var manifests []descriptor
	for _, image := range images {
		manifest, err := a.addImage(image)
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", image.name, err)
		}
		manifest.Annotations = map[string]string{"io.containerd.image.name": image.name}
		manifests = append(manifests, manifest)
	}
	index := encode(map[string]any{"schemaVersion": 2, "manifests": manifests})
	for name, content := range map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion": "1.0.0"}`), "index.json": index} {
		if err := writeFile(a.tar, name, content); err != nil {
			return nil, err
		}
	}
	return a.buffer.Bytes(), a.tar.Close()
}

func (a *archive) addImage(image image) (descriptor, error) {
	content, err := layer(image.files)
	if err != nil {
		return descriptor{}, err
	}
	files, err := a.add("layer.v1.tar", content)
	if err != nil {
		return descriptor{}, err
	}
	config, err := a.add("config.v1+json", encode(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": image.entrypoint, "Cmd": image.args, "Env": []string{"PATH=/bin:/usr/bin:/"}, "WorkingDir": "/"},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{files.Digest}},
	}))
	if err != nil {
		return descriptor{}, err
	}
	return a.add("manifest.v1+json", encode(map[string]any{
		"schemaVersion": 2, "mediaType": mediaTypes + "manifest.v1+json", "config": config, "layers": []descriptor{files},
	}))
}

// add adds a blob.
func (a *archive) add(mediaType string, content []byte) (descriptor, error) {
	sum := fmt.Sprintf("%x", sha256.Sum256(content))
	d := descriptor{MediaType: mediaTypes + mediaType, Digest: "sha256:" + sum, Size: len(content)}
	if a.blobs[sum] {
		return d, nil
	}
	a.blobs[sum] = true
	return d, writeFile(a.tar, "blobs/sha256/"+sum, content)
}

// layer returns a layer with files and their directories.
func layer(files map[string]string) ([]byte, error) {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	dirs := []string{"tmp"}
	for name := range files {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			dirs = append(dirs, dir)
		}
	}
	slices.Sort(dirs)
	for _, dir := range slices.Compact(dirs) {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o1777}); err != nil {
			return nil, err
		}
	}
	// In order, so that equal files make equal layers. What comes twice is a link to its first name.
	first := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		file := files[name]
		if first[file] != "" {
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: first[file], Mode: 0o755}); err != nil {
				return nil, err
			}
			continue
		}
		first[file] = name
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if err := writeFile(w, name, content); err != nil {
			return nil, err
		}
	}
	return buffer.Bytes(), w.Close()
}

func writeFile(w *tar.Writer, name string, content []byte) error {
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}

func encode(value any) []byte {
	content, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return content
}
