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

// sbom returns the path of the bill of materials for an architecture.
func (r *release) sbom(c content, arch string) string {
	return r.staged(fmt.Sprintf("sbom-%s-%s.cdx.json", c.name, arch))
}

// library is a module in a program.
type library struct {
	*debug.Module
	user command
}

// libraries returns the modules in programs, on all architectures.
func (r *release) libraries(c content) ([]library, error) {
	all := map[string]library{}
	for _, arch := range arches {
		for _, command := range c.commands {
			_, modules, err := r.linked(arch, command)
			if err != nil {
				return nil, err
			}
			for _, module := range modules {
				all[module.Path+"@"+module.Version] = library{module, command}
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b library) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Version, b.Version))
	}), nil
}

// linked returns the version of Go and the modules of others in a program.
func (r *release) linked(arch string, c command) (goVersion string, modules []*debug.Module, err error) {
	info, err := buildinfo.ReadFile(r.staged(arch, c.name))
	if err != nil {
		return "", nil, err
	}
	for _, module := range info.Deps {
		if module.Path == product { // the agent's module takes it from its own sources
			continue
		}
		if module.Replace != nil {
			return "", nil, fmt.Errorf("%s: %s is replaced; a release has published modules only", c.name, module.Path)
		}
		modules = append(modules, module)
	}
	return info.GoVersion, modules, nil
}

// writeSBOM writes the bills of programs, one for each architecture.
func (r *release) writeSBOM(c content) error {
	for _, arch := range arches {
		bom, err := r.bill(c, arch)
		if err != nil {
			return err
		}
		out, err := os.Create(r.sbom(c, arch))
		if err != nil {
			return err
		}
		defer out.Close()
		if err := cdx.NewBOMEncoder(out, cdx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
			return err
		}
		if err := r.publish(r.sbom(c, arch), fmt.Sprintf("ebpfnet-%s-%s-%s.cdx.json", r.version, c.name, arch)); err != nil {
			return err
		}
	}
	return nil
}

// bill describes programs for an architecture, each with what it depends on.
func (r *release) bill(c content, arch string) (*cdx.BOM, error) {
	bom := cdx.NewBOM()
	whole := component(cdx.ComponentTypeApplication, product, "v"+r.version, "")
	bom.Metadata = &cdx.Metadata{Timestamp: r.time.Format(time.RFC3339), Component: &whole}
	components := map[string]cdx.Component{}
	dependencies := []cdx.Dependency{{Ref: whole.BOMRef, Dependencies: &[]string{}}}
	for _, command := range c.commands {
		goVersion, modules, err := r.linked(arch, command)
		if err != nil {
			return nil, err
		}
		program := component(cdx.ComponentTypeApplication, product, "v"+r.version, "")
		program.Name = command.name
		program.PackageURL += "#cmd/" + command.name
		program.BOMRef = program.PackageURL
		standard := component(cdx.ComponentTypeLibrary, "std", strings.TrimPrefix(goVersion, "go"), "")
		components[program.BOMRef], components[standard.BOMRef] = program, standard
		*dependencies[0].Dependencies = append(*dependencies[0].Dependencies, program.BOMRef)
		refs := []string{standard.BOMRef}
		for _, module := range modules {
			library := component(cdx.ComponentTypeLibrary, module.Path, module.Version, module.Sum)
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
