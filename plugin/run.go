package plugin

import (
	"encoding/json"
	"os"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// Verbs answers the verbs of the specification, and knows the version that its
// caller spoke.
type Verbs interface {
	Funcs() skel.CNIFuncs
	CNIVersion() string
}

// Run runs the one verb that the environment names (SPEC, section 2), and ends the
// process. about is what a person is told who calls without.
func Run(verbs Verbs, about string) {
	// The library compares namespaces after a verb has run, and would fail a DEL
	// that has done its work; the verbs look for themselves, before.
	os.Setenv("CNI_NETNS_OVERRIDE", "true")

	if err := skel.PluginMainFuncsWithError(verbs.Funcs(), version.All, about); err != nil {
		printError(err, verbs.CNIVersion())
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
