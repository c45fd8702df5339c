// Command ebpfnet is the CNI plugin. A container runtime runs it; see README.md.
package main

import (
	"encoding/json"
	"os"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/plugin"
)

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

func main() {
	// The library compares namespaces after a verb has run, and would fail a DEL
	// that has done its work; the verbs look for themselves, before.
	os.Setenv("CNI_NETNS_OVERRIDE", "true")

	p := plugin.New()
	if err := skel.PluginMainFuncsWithError(p.Funcs(), version.All, about); err != nil {
		printError(err, p.CNIVersion())
		os.Exit(1)
	}
}

// printError prints what the specification wants of an error (SPEC, section 5).
// The library's own leaves out the version.
func printError(err *cnitypes.Error, cniVersion string) {
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "    ")
	_ = encoder.Encode(struct {
		CNIVersion string `json:"cniVersion,omitempty"`
		*cnitypes.Error
	}{cniVersion, err})
}
