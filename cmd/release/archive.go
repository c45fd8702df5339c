package main

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// writeArchive writes the programs with their documents as tar.gz.
func (r *release) writeArchive(arch string) error {
	top := fmt.Sprintf("ebpfnet-%s-linux-%s", r.version, arch)
	files := r.documents(arch, top)
	for _, command := range onHosts.commands {
		files = append(files, file{r.staged(arch, command.name), top + "/" + command.name, 0o755})
	}
	for _, dir := range []string{"hooks", "completion", "man"} {
		staged, err := filepath.Glob(r.staged(dir, "*"))
		if err != nil {
			return err
		}
		for _, source := range staged {
			files = append(files, file{source, top + "/" + dir + "/" + filepath.Base(source), 0o644})
		}
	}
	for _, unit := range units {
		files = append(files, file{r.inRelease("systemd", unit), top + "/systemd/" + unit, 0o644})
	}
	return r.create(top+".tar.gz", func(w io.Writer) error {
		packed, _ := gzip.NewWriterLevel(w, gzip.BestCompression) // a valid level
		if err := writeTar(packed, files, r.time); err != nil {
			return err
		}
		return packed.Close()
	})
}

// writeTar writes files of root, sorted by name, with one time.
func writeTar(w io.Writer, files []file, modified time.Time) error {
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	out := tar.NewWriter(w)
	for _, f := range files {
		content, err := os.ReadFile(f.source)
		if err != nil {
			return err
		}
		header := &tar.Header{Name: f.name, Mode: int64(f.mode), Size: int64(len(content)), ModTime: modified, Format: tar.FormatPAX, Uname: "root", Gname: "root"}
		if err := out.WriteHeader(header); err != nil {
			return err
		}
		if _, err := out.Write(content); err != nil {
			return err
		}
	}
	return out.Close()
}

// create writes a file of the release.
func (r *release) create(name string, write func(io.Writer) error) error {
	out, err := os.Create(filepath.Join(r.out, name))
	if err != nil {
		return err
	}
	defer out.Close()
	if err := write(out); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return out.Close()
}

// publish copies a file into the release.
func (r *release) publish(from, name string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, name), content, 0o644)
}

// writeSums writes SHA256SUMS, which `sha256sum --check` reads.
func (r *release) writeSums() error {
	files, err := filepath.Glob(filepath.Join(r.out, "*"))
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(content), filepath.Base(file))
	}
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), []byte(sums.String()), 0o644)
}
