package main

import (
	"cmp"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// The bill of materials is what the Go linker has written into the programs, so it cannot differ from them.

// sbom returns the path of an architecture's bill of materials.
func (r *release) sbom(arch string) string { return r.staged("sbom-" + arch + ".cdx.json") }

// modules returns the modules in the programs of all architectures, with the Go standard library first.
func (r *release) modules() ([]*debug.Module, error) {
	all := map[string]*debug.Module{}
	for _, arch := range arches {
		for _, command := range commands {
			info, err := buildinfo.ReadFile(r.command(arch, command))
			if err != nil {
				return nil, err
			}
			for _, module := range info.Deps {
				if module.Replace != nil {
					return nil, fmt.Errorf("%s: %s is replaced; a release has published modules only", command, module.Path)
				}
				all[module.Path] = module
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b *debug.Module) int { return cmp.Compare(a.Path, b.Path) }), nil
}

// writeSBOM writes a bill for each architecture.
func (r *release) writeSBOM() error {
	for _, arch := range arches {
		bom, err := r.bill(arch)
		if err != nil {
			return err
		}
		out, err := os.Create(r.sbom(arch))
		if err != nil {
			return err
		}
		defer out.Close()
		if err := cdx.NewBOMEncoder(out, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
			return err
		}
		if err := r.publish(r.sbom(arch), fmt.Sprintf("ebpfnet-%s-linux-%s.cdx.json", r.version, arch)); err != nil {
			return err
		}
	}
	return nil
}

// bill describes the programs of an architecture, each with what it depends on.
func (r *release) bill(arch string) (*cdx.BOM, error) {
	bom := cdx.NewBOM()
	const module = "github.com/ebpfnet/ebpfnet"
	product := component(cdx.ComponentTypeApplication, module, "v"+r.version, "")
	bom.Metadata = &cdx.Metadata{Timestamp: r.time.Format(time.RFC3339), Component: &product}
	components := map[string]cdx.Component{}
	dependencies := []cdx.Dependency{{Ref: product.BOMRef, Dependencies: &[]string{}}}
	for _, command := range commands {
		info, err := buildinfo.ReadFile(r.command(arch, command))
		if err != nil {
			return nil, err
		}
		program := component(cdx.ComponentTypeApplication, module, "v"+r.version, "")
		program.Name = command
		program.PackageURL += "#cmd/" + command
		program.BOMRef = program.PackageURL
		standard := component(cdx.ComponentTypeLibrary, "std", strings.TrimPrefix(info.GoVersion, "go"), "")
		components[program.BOMRef], components[standard.BOMRef] = program, standard
		*dependencies[0].Dependencies = append(*dependencies[0].Dependencies, program.BOMRef)
		refs := []string{standard.BOMRef}
		for _, dep := range info.Deps {
			library := component(cdx.ComponentTypeLibrary, dep.Path, dep.Version, dep.Sum)
			components[library.BOMRef] = library
			refs = append(refs, library.BOMRef)
		}
		dependencies = append(dependencies, cdx.Dependency{Ref: program.BOMRef, Dependencies: &refs})
	}
	sorted := slices.SortedFunc(maps.Values(components), func(a, b cdx.Component) int { return cmp.Compare(a.BOMRef, b.BOMRef) })
	bom.Components, bom.Dependencies = &sorted, &dependencies
	return bom, nil
}

// component describes a program or a module. sum is that of go.sum, "" if there is none.
func component(kind cdx.ComponentType, name, version, sum string) cdx.Component {
	url := "pkg:golang/" + name + "@" + version
	c := cdx.Component{BOMRef: url, PackageURL: url, Type: kind, Name: name, Version: version}
	if digest, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(sum, "h1:")); err == nil && len(digest) > 0 {
		c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(digest)}}
	}
	return c
}
