// Command release builds everything that a release has, without a network: `make release VERSION=1.2.3`.
//
// It is a module of its own, so that what packages and images need is no dependency of the product.
// README.md says what it builds and for whom.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
)

func main() {
	var o options
	flag.StringVar(&o.version, "version", "", "`VERSION` of the release, such as 1.2.3 or 1.2.3-rc.1")
	flag.StringVar(&o.source, "source", "../..", "`DIR` of the sources")
	flag.StringVar(&o.out, "out", "", "`DIR` to write to; what was in it is removed")
	flag.Parse()
	if flag.NArg() > 0 || o.version == "" || o.out == "" {
		flag.Usage()
		os.Exit(2)
	}
	if err := build(o); err != nil {
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		os.Exit(1)
	}
}

func build(o options) error {
	r, err := newRelease(o)
	if err != nil {
		return err
	}
	defer r.close()

	if err := r.buildCommands(); err != nil {
		return err
	}
	if err := r.checkNotes(); err != nil {
		return err
	}
	if err := r.writeDocuments(); err != nil {
		return err
	}
	for _, c := range []content{onHosts, inImage} {
		if err := errors.Join(r.writeCopyright(c), r.writeSBOM(c)); err != nil {
			return err
		}
	}
	for _, arch := range arches {
		if err := errors.Join(r.writePackages(arch), r.writeArchive(arch)); err != nil {
			return err
		}
	}
	if err := r.writeImage(); err != nil {
		return err
	}
	return r.writeSums()
}
