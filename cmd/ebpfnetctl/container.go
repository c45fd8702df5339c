package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// containerHelp is in the help of commands with an argument CONTAINER.
const containerHelp = `CONTAINER is an id or its beginning, NETWORK/CONTAINER[/INTERFACE], an alias, an
address, or a device of the host.`

// containerName names an attachment as the command set wants it: by its owner where nothing else does.
func containerName(a *operator.Attachment) string {
	if a.ContainerID == "" {
		return a.Owner
	}
	return strings.Join([]string{a.Network, a.ContainerID, a.IfName}, "/")
}

// attachmentsOf lists all attachments, or those that a CONTAINER in words means. What cannot be read is
// missing, and in the error; the list is nil where there is nothing to print.
func attachmentsOf(words []string, dataDir string) ([]*operator.Attachment, error) {
	all, err := operator.Attachments(dataDir)
	if all == nil || len(words) == 0 {
		return all, err
	}
	found, notFound := findContainer(all, words[0])
	return found, errors.Join(err, notFound)
}

// findContainer returns the attachments that a CONTAINER means: those that the first rule with any finds.
// A beginning must be that of one id.
func findContainer(all []*operator.Attachment, word string) ([]*operator.Attachment, error) {
	rules := []func(*operator.Attachment) bool{
		func(a *operator.Attachment) bool { return word == a.ContainerID },
		func(a *operator.Attachment) bool {
			return word == containerName(a) || word == a.Network+"/"+a.ContainerID || word == a.Owner
		},
		func(a *operator.Attachment) bool { return slices.Contains(a.Aliases, word) },
		func(a *operator.Attachment) bool { return word == a.Device || hasAddress(a, word) },
		func(a *operator.Attachment) bool { return strings.HasPrefix(a.ContainerID, word) },
	}
	if word == "" {
		return nil, usageError{fmt.Errorf("CONTAINER is empty: expected an id, a name, an alias, an address or a device")}
	}
	for i, matches := range rules {
		found := slices.DeleteFunc(slices.Clone(all), func(a *operator.Attachment) bool { return !matches(a) })
		ids := idsOf(found)
		if i == len(rules)-1 && len(ids) > 1 {
			return nil, fmt.Errorf("%s is the beginning of %d containers: %s", show.Value(word), len(ids), strings.Join(ids, ", "))
		}
		if len(found) > 0 {
			return found, nil
		}
	}
	return nil, fmt.Errorf("%w: %s", operator.ErrNoAttachment, show.Value(word))
}

func idsOf(attachments []*operator.Attachment) (ids []string) {
	for _, a := range attachments {
		ids = append(ids, a.ContainerID)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

func hasAddress(a *operator.Attachment, word string) bool {
	return slices.ContainsFunc(a.Addresses, func(address operator.Address) bool { return address.Address.String() == word })
}

// completeContainers completes a CONTAINER by the names of those that are connected.
func completeContainers(dataDir *string) cobra.CompletionFunc {
	return func(_ *cobra.Command, words []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var names []string
		if len(words) == 0 {
			attachments, _ := operator.Attachments(*dataDir) // what can be read
			for _, a := range attachments {
				names = append(append(names, a.ContainerID, containerName(a)), a.Aliases...)
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
