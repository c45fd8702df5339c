package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// suite is a test binary that runs in guests.
type suite struct {
	name  string
	title string // in the table
	tests string // the tests to run, a regular expression
	quick string // with -quick
}

// timeout is for one suite on one kernel. The scenarios take 50 minutes beside another guest on two cores.
const timeout = 2 * time.Hour

// Most tests load the programs, which takes seconds in a guest: -quick runs some tests of each kind.
var suites = []suite{
	{
		name: "prog", title: "packet tables",
		tests: ".",
		quick: "^Test(Load|Spec|Layout|Offsets|MasqSource.*|ToUplinkMasquerades|ToUplinkReplies|From.*|ToLoopback|HostPort.*|Fragments|ICMPErrorsFromHairpinServer|FlowTableFull|FlowTableFullForHostPort|FlowState|ToContainer.*)$",
	},
	{
		name: "scenario", title: "scenarios",
		tests: ".",
		quick: "^Test(Clsact|ForeignTCXPrograms|PodsReachEachOther|PodAndHostReachEachOther|PodReachesItself|PodWithoutMasquerade|ErrorsLowerNoLocalPathMTU|BridgeNetfilterOnUplink|HostPort|HostPortFromHost|HostIP|LargeDatagrams|PortUnreachable|UplinkKinds|Downloads|PolicySCTP)$",
	},
	{
		// Every verb through libcni and as a bare call.
		name: "conformance", title: "CNI contract",
		tests: "^Test(Container|Check|CheckPrograms|Del|GC|StatusReady|Results|UplinkReattached)$",
		quick: "^Test(Check|CheckPrograms|Del|GC|StatusReady)$",
	},
	{
		// Tunnels, direct routes, upgrade, repair of what was deleted; the manifest's container.
		name: "cluster", title: "node agent",
		tests: "^Test(Cluster|NodeChanges|Hosts|Host[A-Z].*|Auto|UnderlayIPv6|Container|LockedMemory|RightsOfAgent)$",
		quick: "^Test(Host[A-Z].*|LockedMemory|Container)$",
	},
}

// run runs the suite on a kernel. It returns a report even with an error.
func (s suite) run(bin, tests, series string, quick bool) (*report, error) {
	pattern := s.tests
	if quick {
		pattern = s.quick
	}
	logFile := filepath.Join(bin, "kernels", series+"-"+s.name+".log")
	log, err := os.Create(logFile)
	if err != nil {
		return &report{}, err
	}
	defer log.Close()

	vm := exec.Command(filepath.Join(bin, "vm"), "-kernel", series, "-timeout", timeout.String(), "--",
		filepath.Join(bin, s.name+".test"), "-test.v", "-test.short", "-test.timeout=0", "-test.run", pattern)
	vm.Dir = filepath.Join(tests, s.name) // as go test does, for testdata
	vm.Env = append(os.Environ(), "EBPFNET_BIN_DIR="+bin)
	vm.Stdout, vm.Stderr = log, log
	begin := time.Now()
	vmErr := vm.Run()

	text, err := os.ReadFile(logFile)
	if err != nil {
		return &report{}, err
	}
	r := parseReport(string(text))
	// vm also fails if the guest died, or if tests left something behind.
	r.clean = r.clean && (vmErr == nil || len(r.tests("FAIL")) > 0)
	fmt.Printf("%-5s %-14s %s, %v\n", series, s.title, r, time.Since(begin).Round(time.Second))
	if err := errors.Join(vmErr, r.check()); err != nil {
		return r, fmt.Errorf("%s on %s: %w (log: %s)\n%s", s.title, series, err, logFile, strings.Join(r.excerpt(), "\n"))
	}
	return r, nil
}
