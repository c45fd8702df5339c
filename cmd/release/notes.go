package main

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
)

// checkNotes requires release notes that name the map layout: users need to know whether an upgrade stops
// their containers.
func (r *release) checkNotes() error {
	notes, err := r.notes()
	if err != nil {
		return err
	}
	abi, err := r.abi()
	if err != nil {
		return err
	}
	return layoutIn(notes, abi)
}

// layoutIn returns an error unless the notes name the map layout.
func layoutIn(notes []byte, abi int) error {
	layout := fmt.Sprintf("Map layout: %d", abi)
	if !regexp.MustCompile(layout + `\b`).Match(notes) {
		return fmt.Errorf("release notes: expected %q in the section of this version", layout)
	}
	return nil
}

// notes returns the section of this release, or of the next one for a preview.
func (r *release) notes() ([]byte, error) {
	text, err := os.ReadFile(r.changelog())
	if err != nil {
		return nil, err
	}
	heading := r.version
	if r.isPreview() {
		heading = "Unreleased"
	}
	section := regexp.MustCompile(`(?ms)^## ` + regexp.QuoteMeta(heading) + `(?: [^\n]*)?\n(.*?)(^## |\z)`).FindSubmatch(text)
	if section == nil && r.isPreview() { // the notes on a release that is not tagged yet are complete
		section = regexp.MustCompile(`(?ms)^## [^\n]*\n(.*?)(^## |\z)`).FindSubmatch(text)
	}
	if section == nil {
		return nil, fmt.Errorf("%s: expected a section %q", r.changelog(), "## "+heading)
	}
	return bytes.TrimSpace(section[1]), nil
}

func (r *release) changelog() string { return filepath.Join(r.source, "cmd/release/CHANGELOG.md") }

// shipped are the documents of packages and archives, which have the same places there.
var shipped = []string{"README.md", "plugin/README.md", "plugin/SECURITY.md", "plugin/overview.svg", "cmd/ebpfnetctl/README.md", "cmd/release/README.md"}

// writeShipped stages them.
func (r *release) writeShipped() error {
	for _, name := range shipped {
		text, err := os.ReadFile(filepath.Join(r.source, name))
		if err != nil {
			return err
		}
		if err := r.writeStaged("documents/"+name, withLinks(text, path.Dir(name), sources+"/blob/v"+r.version)); err != nil {
			return err
		}
	}
	return nil
}

// sources are the repository's address, with a tag for each version.
const sources = "https://" + product

// relativeLink is a link of Markdown to another file: what it leads to, and where in it.
var relativeLink = regexp.MustCompile(`\]\(([^()#:]+)(#[^()]*)?\)`)

// withLinks returns a document of a directory whose links to what is not shipped lead to a tree of sources.
func withLinks(text []byte, dir, tree string) []byte {
	return relativeLink.ReplaceAllFunc(text, func(link []byte) []byte {
		match := relativeLink.FindSubmatch(link)
		target := path.Join(dir, string(match[1]))
		if slices.Contains(shipped, target) {
			return link
		}
		return []byte("](" + tree + "/" + target + string(match[2]) + ")")
	})
}
