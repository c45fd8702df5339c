package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// writeImage writes one image for all architectures as an OCI archive, which `ctr images import`, podman and skopeo
// read. It has the programs and nothing else, and starts the agent for clusters.
func (r *release) writeImage() error {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range arches {
		image, err := r.image(arch)
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: platformOf(arch)}})
	}
	// An archive's own index names the images in it.
	dir, err := layout.Write(r.staged("image"), empty.Index)
	if err != nil {
		return err
	}
	if err := dir.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          "docker.io/library/ebpfnet-node:" + r.version, // what the agent's manifests call it
		"org.opencontainers.image.ref.name": r.version,
	})); err != nil {
		return err
	}
	files, err := filesBelow(r.staged("image"))
	if err != nil {
		return err
	}
	return r.create("ebpfnet-"+r.version+"-image.tar", func(w io.Writer) error { return writeTar(w, files, r.time) })
}

// platformOf returns an architecture by the words of images.
func platformOf(arch string) *v1.Platform {
	variant := map[string]string{"arm64": "v8"}[arch]
	return &v1.Platform{OS: "linux", Architecture: arch, Variant: variant}
}

func (r *release) image(arch string) (v1.Image, error) {
	files := []file{
		{r.copyright(inImage), "usr/share/doc/ebpfnet/copyright", 0o644},
		{r.sbom(inImage, arch), "usr/share/doc/ebpfnet/sbom.cdx.json", 0o644},
	}
	for _, command := range inImage.commands { // the agent takes the plugins from its own directory
		files = append(files, file{r.staged(arch, command.name), "usr/bin/" + command.name, 0o755})
	}
	var layer bytes.Buffer
	if err := writeTar(&layer, files, r.time); err != nil {
		return nil, err
	}
	packed, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(layer.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.Append(image, mutate.Addendum{
		Layer:   packed,
		History: v1.History{Created: v1.Time{Time: r.time}, CreatedBy: "make release VERSION=" + r.version},
	})
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	return mutate.ConfigFile(image, r.imageConfig(arch, config))
}

// imageConfig completes a configuration by what a runtime has to know of the image.
func (r *release) imageConfig(arch string, layers *v1.ConfigFile) *v1.ConfigFile {
	config := layers.DeepCopy()
	platform := platformOf(arch)
	config.OS, config.Architecture, config.Variant = platform.OS, platform.Architecture, platform.Variant
	config.Created = v1.Time{Time: r.time}
	config.Config = v1.Config{
		Entrypoint: []string{"/usr/bin/ebpfnet-node"},
		Env:        []string{"PATH=/usr/bin"},
		Labels: map[string]string{
			"org.opencontainers.image.title":    "ebpfnet-node",
			"org.opencontainers.image.version":  r.version,
			"org.opencontainers.image.licenses": "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)",
			"org.opencontainers.image.source":   sources,
		},
	}
	return config
}

// filesBelow lists the files of a directory by their relative names.
func filesBelow(dir string) (files []file, err error) {
	err = filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files = append(files, file{path, strings.TrimPrefix(path, dir+"/"), 0o644})
		}
		return err
	})
	return files, err
}
