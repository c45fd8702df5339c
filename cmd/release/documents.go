package main

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
)

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
