// Command ebpfnet-ipam gives other CNI plugins addresses, in the place of host-local
// and on its files.
package main

import "github.com/ebpfnet/ebpfnet/plugin"

const about = `ebpfnet-ipam is a CNI plugin for addresses, which other plugins call: write it where "host-local" stands.

  "ipam": {
    "type": "ebpfnet-ipam",
    "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
  }

Keys and files are host-local's, so that a host can change over and back. (The plugin ebpfnet has
the same inside, as "host-local".)
`

func main() { plugin.Run(plugin.NewIPAM(), about) }
