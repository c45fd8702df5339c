package main

import (
	"context"
	"fmt"
	"io"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// version is what `ebpfnetctl version -o json` prints.
type version struct {
	Revision uint32         `json:"revision"` // of the programs; a higher one replaces a lower one
	Build    loader.BuildID `json:"build"`    // a hash of the programs
	ABI      uint32         `json:"abi"`      // of the maps' layout
}

func printVersion(_ context.Context, to io.Writer, o options) error {
	v := version{bpf.Revision, loader.BuildID(bpf.Build()), loader.ABI}
	if o.json {
		return printJSON(to, v)
	}
	printf(to, "%s, ABI %d\n", programVersion(v.Revision, v.Build), v.ABI)
	return nil
}

// programVersion names programs in messages.
func programVersion(revision uint32, build loader.BuildID) string {
	return fmt.Sprintf("revision %d, build %s", revision, build)
}
