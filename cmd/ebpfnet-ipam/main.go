// Command ebpfnet-ipam is an IPAM plugin (SPEC, section 4) that replaces host-local, with the same
// keys and on the same files.
package main

import (
	"os"

	"github.com/ebpfnet/ebpfnet/plugin/cni"
)

const about = `ebpfnet-ipam is a CNI plugin that allocates addresses for other plugins. Use it in place of "host-local":

  "ipam": {
    "type": "ebpfnet-ipam",
    "ranges": [[{"subnet": "10.84.0.0/16"}], [{"subnet": "fd00:84::/64"}]],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
  }

Keys and files are host-local's, so a host can switch in both directions. The plugin ebpfnet has the
same allocator built in, as "host-local".
`

func main() { cni.Run(plugin{stdout: os.Stdout}, "ebpfnet-ipam", about) }
