package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	release "github.com/ebpfnet/ebpfnet/plugin/version"
)

// version is what `ebpfnetctl version -o json` prints: schema/version.json.
type version struct {
	Version  string         `json:"version"`  // of the release
	Revision uint32         `json:"revision"` // of the programs; a higher one replaces a lower one
	Build    loader.BuildID `json:"build"`    // a hash of the programs
	ABI      uint32         `json:"abi"`      // of the maps' layout
}

func newVersion() *cobra.Command {
	var flags output.Flags
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "version of this binary and of its programs",
		Long:    "Prints the version of this binary, of the programs in it, and of its map layout\n(ABI).",
		Example: "  ebpfnetctl version\n  ebpfnetctl version -o json",
		Args:    noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := version{release.String(), bpf.Revision, loader.BuildID(bpf.Build), loader.ABI}
			p := output.New(cmd.OutOrStdout(), flags)
			return p.Document(v, v.Version, func() {
				p.Printf("%s, %s, ABI %d\n", v.Version, programVersion(v.Revision, v.Build), v.ABI)
			})
		},
	}
	flags.AddToRead(cmd.Flags())
	return cmd
}

// programVersion names programs in messages.
func programVersion(revision uint32, build loader.BuildID) string {
	return fmt.Sprintf("revision %d, build %s", revision, build)
}
