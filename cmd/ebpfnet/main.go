// Command ebpfnet is the CNI plugin. A container runtime runs it; see README.md.
package main

import "github.com/ebpfnet/ebpfnet/plugin"

const about = `ebpfnet connects containers to the network of a host: a veth per container, eBPF programs on it,
no bridge, no iptables, no daemon. It is a CNI plugin: a container runtime runs it by a list like this one
in /etc/cni/net.d, with this program in /opt/cni/bin.

  {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [{
      "type": "ebpfnet",
      "ipMasq": true,
      "capabilities": {"portMappings": true},
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      }
    }]
  }
`

func main() { plugin.Run(plugin.New(), about) }
