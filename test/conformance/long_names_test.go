package conformance

import (
	"os"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/plugin/show"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// longNames are names as runtimes give them, and as long as the specification lets them be. The alias of a device
// has room for 255 characters, and so has a file name, as which host-local uses that of the network.
var longNames = []struct {
	name        string
	network, id int // characters
}{
	{"as runtimes give them", 100, 64},
	{"one too many for an alias", 255 - len("ebpfnet") - 1 - 64 - 1 - len("/eth0"), 65},
	{"of a file name's length", 255, 255},
	{"of any length", 255, 10000},
}

// withLongNames makes a container with names of these lengths, and a second one beside it.
func (h *host) withLongNames(t *testing.T, conf object, network, id int) (p, other *pod) {
	t.Helper()
	pods := []*pod{}
	for _, name := range []string{"c", "d"} {
		p := h.pod(t, name, with(conf, "name", strings.Repeat("n", network)))
		p.id = strings.Repeat(name, id)
		t.Cleanup(func() { p.try(t, "DEL") })
		pods = append(pods, p)
	}
	return pods[0], pods[1]
}

// TestLongNames calls every verb and the operator's tool for containers with long names.
func TestLongNames(t *testing.T) {
	h := newHost(t)
	for _, test := range longNames {
		t.Run(test.name, func(t *testing.T) {
			before := h.snapshot(t)
			p, other := h.withLongNames(t, with(dual("1.1.0"), "runtimeConfig.portMappings", webPort), test.network, test.id)
			p.add(t)
			wantSuccess(t, p.try(t, "CHECK"), "")
			wantPing(t, p.Namespace, testenv.OutsideAddr4)
			result := p.result
			p.result = nil
			wantError(t, p.try(t, "ADD"), cnierr.CodeAttachmentExists, show.Short(p.id))
			wantError(t, other.try(t, "ADD"), cnierr.CodePortTaken, "8080",
				show.Short(p.conf["name"].(string))+" "+show.Short(p.id)+" eth0")
			h.wantCtl(t, 0, []string{"attachments", p.id}, "containerID: "+p.id, "network: "+p.conf["name"].(string))
			h.wantCtl(t, 0, []string{"set", p.conf["name"].(string) + "/" + p.id, "ingressPolicy=isolated"}, p.id)
			p.result = result
			wantSuccess(t, p.try(t, "CHECK"), "")

			h.gc(t, with(p.conf, "runtimeConfig", absent))
			h.gc(t, withKey(p.conf, currentKey, attachments(p.id)))
			h.gc(t, withKey(with(p.conf, "name", "n"), currentKey, list{})) // another network
			wantSuccess(t, p.try(t, "CHECK"), "")
			h.gc(t, withKey(p.conf, currentKey, attachments(other.id)))
			h.wantUnchanged(t, before)

			p.add(t)
			p.del(t)
			h.wantUnchanged(t, before)
		})
	}
	t.Run("without a record", func(t *testing.T) { longNamesWithoutRecord(t, h) })
	t.Run("too long for a directory", func(t *testing.T) { tooLongNetwork(t, h) })
	// Last: the devices of its container's namespace go some time after it.
	t.Run("without addresses", func(t *testing.T) { longNamesWithoutAddresses(t, h) })
}

// longNamesWithoutRecord loses the records, in which names are that fit into no alias. The owner's token in the
// alias is left: GC keeps what lives, and removes what the runtime does not list.
func longNamesWithoutRecord(t *testing.T, h *host) {
	t.Helper()
	before := h.snapshot(t)
	p, _ := h.withLongNames(t, dual("1.1.0"), 255, 255)
	p.add(t)
	testenv.Must(t, os.RemoveAll(record.DefaultDir))
	wantError(t, p.try(t, "CHECK"), cnierr.CodeDiffers, "record", record.DefaultDir, "missing")
	h.gc(t, p.conf)
	h.gc(t, withKey(p.conf, currentKey, attachments(p.id)))
	wantPing(t, p.Namespace, testenv.OutsideAddr4)
	h.gc(t, withKey(with(p.conf, "name", "n"), currentKey, list{})) // another network
	wantPing(t, p.Namespace, testenv.OutsideAddr4)
	h.gc(t, withKey(p.conf, currentKey, list{}))
	h.wantUnchanged(t, before)
}

// longNamesWithoutAddresses has names of any length where no file is named after the network: for an interface
// without addresses, and for another plugin's, whose device has no alias of ours.
func longNamesWithoutAddresses(t *testing.T, h *host) {
	t.Helper()
	chained := h.chainedPod(t)
	alone := h.pod(t, "c2", with(single("1.1.0"), "ipam", absent))
	for name, p := range map[string]*pod{"first": alone, "chained": chained} {
		t.Run(name, func(t *testing.T) {
			before := h.snapshot(t, p.Namespace)
			p.conf, p.id = with(p.conf, "name", strings.Repeat("n", 5000)), strings.Repeat("c", 5000)
			p.add(t)
			wantSuccess(t, p.try(t, "CHECK"), "")
			h.wantCtl(t, 0, []string{"attachments", p.id}, "containerID: "+p.id, "network: "+p.conf["name"].(string))
			h.gc(t, withKey(p.conf, currentKey, attachments(p.id)))
			h.gc(t, withKey(with(p.conf, "runtimeConfig", absent), currentKey, nil))
			wantSuccess(t, p.try(t, "CHECK"), "")
			p.del(t)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// tooLongNetwork has a name that no directory of reservations can have. What ADD refuses, DEL and GC clean up.
func tooLongNetwork(t *testing.T, h *host) {
	t.Helper()
	p, _ := h.withLongNames(t, dual("1.1.0"), 256, 1)
	before := h.snapshot(t, p.Namespace)
	wantError(t, p.try(t, "ADD"), codeInvalidConfig, "name", "nnn", "255")
	p.del(t)
	h.gc(t, p.conf)
	h.gc(t, withKey(p.conf, currentKey, list{}))
	h.wantUnchanged(t, before, p.Namespace)
}
