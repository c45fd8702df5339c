package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader/flock"
)

// image is a kernel in the cache: a directory with vmlinux, lib/modules, and a file release with the
// output of uname -r.
type image struct {
	dir     string
	release string
}

func (i image) kernelFile() string { return filepath.Join(i.dir, "vmlinux") }
func (i image) moduleDir() string  { return filepath.Join(i.dir, "lib/modules", i.release) }

// cachedImage returns the kernel's image. If the cache does not have it, one process fetches it and
// the others wait.
func cachedImage(ctx context.Context, k kernel) (image, error) {
	userCache, err := os.UserCacheDir()
	if err != nil {
		return image{}, err
	}
	cache := filepath.Join(userCache, "ebpfnet/kernels")
	dir := filepath.Join(cache, k.dir())
	if img, err := openImage(dir); !errors.Is(err, os.ErrNotExist) {
		return img, err
	}

	if err := os.MkdirAll(cache, 0o755); err != nil {
		return image{}, err
	}
	lock, err := flock.Acquire(ctx, filepath.Join(cache, "lock"), flock.Exclusive)
	if err != nil {
		return image{}, err
	}
	defer lock.Release()
	if img, err := openImage(dir); !errors.Is(err, os.ErrNotExist) {
		return img, err
	}
	if err := fetchImage(ctx, k, dir); err != nil {
		return image{}, err
	}
	return openImage(dir)
}

// openImage returns an error that wraps os.ErrNotExist if dir has no complete image.
func openImage(dir string) (image, error) {
	release, err := os.ReadFile(filepath.Join(dir, "release"))
	if err != nil {
		return image{}, err
	}
	return image{dir: dir, release: string(release)}, nil
}

// fetchImage builds the image in a directory next to dir and renames it when it is complete.
func fetchImage(ctx context.Context, k kernel, dir string) error {
	fmt.Fprintf(os.Stderr, "vm: fetching kernel %s from %s\n", k.series, k.suite)
	work := dir + ".fetch"
	// A killed process may have left this directory; the caller holds the lock.
	if err := os.RemoveAll(work); err != nil {
		return err
	}
	defer os.RemoveAll(work)
	aptDir, tree := filepath.Join(work, "apt"), filepath.Join(work, "tree")
	if err := errors.Join(os.MkdirAll(aptDir, 0o700), os.MkdirAll(tree, 0o755)); err != nil {
		return err
	}

	release, debs, err := downloadPackages(ctx, k, aptDir)
	if err != nil {
		return err
	}
	for _, deb := range debs {
		if err := unpack(ctx, deb, tree); err != nil {
			return fmt.Errorf("unpack %s: %w", filepath.Base(deb), err)
		}
	}
	if _, err := output(ctx, tree, "depmod", "-b", tree, release); err != nil {
		return err
	}
	boot := bootFile(tree, release)
	if archs[k.flavour].bootable {
		err = os.Rename(boot, image{dir: tree}.kernelFile())
	} else if err = extractKernel(ctx, boot, image{dir: tree}.kernelFile()); err == nil {
		err = os.Remove(boot)
	}
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tree, "release"), []byte(release), 0o644); err != nil {
		return err
	}
	return os.Rename(tree, dir)
}

// bootFile returns the path of the compressed kernel: since 7.2, it is next to the modules.
func bootFile(tree, release string) string {
	inBoot := filepath.Join(tree, "boot/vmlinuz-"+release)
	if _, err := os.Stat(inBoot); err == nil {
		return inBoot
	}
	return filepath.Join(tree, "lib/modules", release, "vmlinuz")
}

// downloadPackages fetches the newest packages of a kernel to dir. Since 7.2, the image package is
// empty, and three other packages have its content.
func downloadPackages(ctx context.Context, k kernel, dir string) (release string, debs []string, err error) {
	repo, err := newAptRepo(ctx, dir, k.suite, k.flavour)
	if err != nil {
		return "", nil, err
	}
	names, err := repo.packageNames(ctx, "linux-")
	if err != nil {
		return "", nil, err
	}
	release, err = k.newestRelease(names)
	if err != nil {
		return "", nil, err
	}
	packages := []string{"linux-image-" + release}
	for _, part := range []string{"linux-base-" + release, "linux-binary-" + release, "linux-modules-" + release} {
		if slices.Contains(names, part) {
			packages = append(packages, part)
		}
	}
	debs, err = repo.download(ctx, packages...)
	return release, debs, err
}

// keptModules says which directories of modules to keep; the longest matching prefix of a module's
// path decides. It leaves out drivers for hardware that no guest has, most of the whole.
var keptModules = map[string]bool{
	"":                      true,
	"sound/":                false,
	"drivers/":              false,
	"drivers/block/":        true,
	"drivers/char/":         true,
	"drivers/net/":          true,
	"drivers/net/ethernet/": false,
	"drivers/net/wireless/": false,
	"drivers/ptp/":          true,
	"drivers/vhost/":        true,
	"drivers/virtio/":       true,
}

func keeps(path string) bool {
	_, module, isModule := strings.Cut(path, "/kernel/")
	if !isModule {
		return strings.HasPrefix(path, "boot/") || strings.HasPrefix(path, "lib/modules/")
	}
	keep, longest := false, -1
	for prefix, kept := range keptModules {
		if strings.HasPrefix(module, prefix) && len(prefix) > longest {
			keep, longest = kept, len(prefix)
		}
	}
	return keep
}

// unpack moves the files of a package that are kept to dir. It runs dpkg-deb, because archive/tar
// would link this program dynamically, by way of os/user.
func unpack(ctx context.Context, deb, dir string) error {
	all := deb + ".unpacked"
	if _, err := output(ctx, "/", "dpkg-deb", "-x", deb, all); err != nil {
		return err
	}
	err := filepath.WalkDir(all, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		path, err := filepath.Rel(all, file)
		if err != nil {
			return err
		}
		path = strings.TrimPrefix(path, "usr/") // since 6.12, packages have usr/lib
		if !keeps(path) {
			return nil
		}
		target := filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		return os.Rename(file, target)
	})
	return errors.Join(err, os.RemoveAll(all))
}
