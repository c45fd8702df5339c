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
	"syscall"
)

// image is a kernel in the cache, in a directory that has vmlinux, release (the
// name that uname -r prints) and lib/modules.
type image struct {
	dir     string
	release string
}

func (i image) kernelFile() string { return filepath.Join(i.dir, "vmlinux") }
func (i image) moduleDir() string  { return filepath.Join(i.dir, "lib/modules", i.release) }

// cachedImage returns the kernel's image and fetches it if the cache does not
// have it yet. Only one process fetches at a time, the others wait for it.
func cachedImage(ctx context.Context, k kernel) (image, error) {
	userCache, err := os.UserCacheDir()
	if err != nil {
		return image{}, err
	}
	cache := filepath.Join(userCache, "ebpfnet/kernels")
	dir := filepath.Join(cache, k.series)
	if img, err := openImage(dir); !errors.Is(err, os.ErrNotExist) {
		return img, err
	}

	if err := os.MkdirAll(cache, 0o755); err != nil {
		return image{}, err
	}
	unlock, err := lockFile(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return image{}, err
	}
	defer unlock()
	if img, err := openImage(dir); !errors.Is(err, os.ErrNotExist) {
		return img, err
	}
	if err := fetchImage(ctx, k, dir); err != nil {
		return image{}, err
	}
	return openImage(dir)
}

// openImage returns an error that wraps os.ErrNotExist if dir is no image.
func openImage(dir string) (image, error) {
	release, err := os.ReadFile(filepath.Join(dir, "release"))
	if err != nil {
		return image{}, err
	}
	return image{dir: dir, release: string(release)}, nil
}

// fetchImage makes the image in a directory beside dir, and renames that to
// dir when it is complete.
func fetchImage(ctx context.Context, k kernel, dir string) error {
	fmt.Fprintf(os.Stderr, "vm: fetching kernel %s from %s\n", k.series, k.suite)
	work := dir + ".fetch"
	// A killed process may have left it; the caller's lock keeps others out.
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
	if err := extractKernel(ctx, boot, image{dir: tree}.kernelFile()); err != nil {
		return err
	}
	if err := os.Remove(boot); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tree, "release"), []byte(release), 0o644); err != nil {
		return err
	}
	return os.Rename(tree, dir)
}

// bootFile is where the packages have the kernel: since 7.2, beside the modules.
func bootFile(tree, release string) string {
	inBoot := filepath.Join(tree, "boot/vmlinuz-"+release)
	if _, err := os.Stat(inBoot); err == nil {
		return inBoot
	}
	return filepath.Join(tree, "lib/modules", release, "vmlinuz")
}

// downloadPackages fetches the newest packages of a kernel to dir. Since 7.2,
// the image package is empty and others have its parts.
func downloadPackages(ctx context.Context, k kernel, dir string) (release string, debs []string, err error) {
	repo, err := newAptRepo(ctx, dir, k.suite)
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

// wantedModules says which directories of modules to keep: the entry with the
// longest prefix of a module's path decides. Left out is hardware that no guest
// has, three quarters of the whole.
var wantedModules = map[string]bool{
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

func isWanted(path string) bool {
	_, module, isModule := strings.Cut(path, "/kernel/")
	if !isModule {
		return strings.HasPrefix(path, "boot/") || strings.HasPrefix(path, "lib/modules/")
	}
	keep, longest := false, -1
	for prefix, want := range wantedModules {
		if strings.HasPrefix(module, prefix) && len(prefix) > longest {
			keep, longest = want, len(prefix)
		}
	}
	return keep
}

// unpack moves the wanted files of a package below dir. It goes by way of
// dpkg-deb and not of archive/tar, with which this program would not be static.
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
		path = strings.TrimPrefix(path, "usr/") // since 6.12, lib is below it
		if !isWanted(path) {
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

// lockFile takes an exclusive lock on a file, which it creates. The file stays.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	locked := make(chan error, 1)
	go func() { locked <- syscall.Flock(int(f.Fd()), syscall.LOCK_EX) }()
	select {
	case err = <-locked:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}
