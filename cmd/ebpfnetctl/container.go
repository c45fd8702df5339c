package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// containerHelp is in the help of commands with an argument CONTAINER.
const containerHelp = `CONTAINER is a name, such as web or shop/web-0, an ID or its beginning,
NETWORK/CONTAINER[/INTERFACE], an alias, an address, or a device of the host.`

// containerName identifies an attachment as the command set expects it: by its owner where nothing else does.
func containerName(n admin.Named) string {
	if n.ContainerID == "" {
		return n.Owner
	}
	return strings.Join([]string{n.Network, n.ContainerID, n.IfName}, "/")
}

// attachments lists all attachments, and those that the CONTAINERs in words mean: without words, all. What cannot be
// read is missing, and in the error; chosen is nil where there is nothing to print.
func (o *containerOptions) attachments() (all, chosen []*admin.Attachment, err error) {
	all, err = containers.Attachments(o.dirs.data, o.dirs.cache)
	if all == nil || len(o.words) == 0 {
		return all, all, err
	}
	chosen, errFind := findContainers(all, o.words)
	return all, chosen, errors.Join(err, errFind)
}

func findContainers(all []*admin.Attachment, words []string) (found []*admin.Attachment, err error) {
	for _, word := range words {
		its, notFound := findContainer(all, word)
		found, err = append(found, its...), errors.Join(err, notFound)
	}
	return found, err
}

// containerRules find the attachments that a CONTAINER means, the first rule first.
var containerRules = []func(a *admin.Attachment, word string) bool{
	func(a *admin.Attachment, word string) bool { return word == a.ContainerID },
	func(a *admin.Attachment, word string) bool { return word == a.Name },
	func(a *admin.Attachment, word string) bool {
		isIts := func(name string) bool {
			return name != "" && (word == a.Network+"/"+name || word == a.Network+"/"+name+"/"+a.IfName)
		}
		return word == a.Owner || isIts(a.ContainerID) || isIts(a.Name)
	},
	func(a *admin.Attachment, word string) bool { return strings.HasSuffix(a.Name, "/"+word) },
	func(a *admin.Attachment, word string) bool { return slices.Contains(a.Aliases, word) },
	func(a *admin.Attachment, word string) bool {
		addr, err := netip.ParseAddr(word)
		return word == a.Device || err == nil && a.HasAddress(addr)
	},
	func(a *admin.Attachment, word string) bool {
		_, id, _ := containers.CutNerdctl(a.ContainerID)
		return strings.HasPrefix(a.ContainerID, word) || strings.HasPrefix(id, word)
	},
}

// findContainer returns the attachments of the container that a CONTAINER means: those that the first rule with any
// finds. Containers that are gone count only where no other has the name: it may be in use again.
func findContainer(all []*admin.Attachment, word string) ([]*admin.Attachment, error) {
	if word == "" {
		return nil, usageError{fmt.Errorf("CONTAINER is empty: expected an ID, a name, an alias, an address or a device")}
	}
	for _, matches := range containerRules {
		found := slices.DeleteFunc(slices.Clone(all), func(a *admin.Attachment) bool { return !matches(a, word) })
		if isAlive := func(a *admin.Attachment) bool { return !a.Dead }; slices.ContainsFunc(found, isAlive) {
			found = slices.DeleteFunc(found, func(a *admin.Attachment) bool { return a.Dead })
		}
		if titles := titlesOf(found); len(titles) > 1 {
			return nil, fmt.Errorf("%s is ambiguous, it means %d containers: %s", show.Value(word), len(titles), strings.Join(titles, ", "))
		}
		if len(found) > 0 {
			return found, nil
		}
	}
	return nil, fmt.Errorf("%w: %s", admin.ErrNoAttachment, show.Value(word))
}

// titlesOf returns a title for each of the containers, with the beginning of its ID where it has a name.
func titlesOf(attachments []*admin.Attachment) (titles []string) {
	const digits = 12

	ids := map[string]bool{}
	for _, a := range attachments {
		id := cmp.Or(a.ContainerID, a.Owner)
		if ids[id] {
			continue
		}
		ids[id] = true
		if a.Name != "" {
			if _, short, ok := containers.CutNerdctl(id); ok {
				id = short
			}
			id = fmt.Sprintf("%s (%.*s)", a.Name, digits, id)
		}
		titles = append(titles, id)
	}
	slices.Sort(titles)
	return titles
}

// completeContainers completes the first arguments by the names of containers that are connected.
func completeContainers(dirs *directories, maximum int) cobra.CompletionFunc {
	return func(_ *cobra.Command, words []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var names []string
		if len(words) < maximum {
			attachments, _ := containers.Attachments(dirs.data, dirs.cache) // what can be read
			for _, a := range attachments {
				names = append(append(names, a.ContainerID, a.Name, containerName(a.Named)), a.Aliases...)
			}
		}
		return completionsOf(names, begun), cobra.ShellCompDirectiveNoFileComp
	}
}

// completionsOf returns those of some names that begin as a word does, and that a shell cannot misread.
func completionsOf(names []string, begun string) []cobra.Completion {
	fits := func(name string) bool { return strings.HasPrefix(name, begun) && output.IsWord(name) }
	names = slices.DeleteFunc(names, func(name string) bool { return !fits(name) })
	slices.Sort(names)
	return slices.Compact(names)
}
