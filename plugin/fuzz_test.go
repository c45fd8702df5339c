package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"reflect"
	"slices"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/config"
)

func parseText(stdin []byte) (*verb, error) {
	call, err := config.NewCall(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: stdin})
	if err != nil {
		return nil, err
	}
	return parse(&cni.Call{Call: call, Log: slog.New(slog.DiscardHandler)})
}

// wantRefusal requires an error with a message and a code for what a runtime sends.
func wantRefusal(t *testing.T, err error) {
	t.Helper()
	codes := []uint{cnitypes.ErrUnsupportedField, cnitypes.ErrInvalidEnvironmentVariables, cnitypes.ErrDecodingFailure, cnitypes.ErrInvalidNetworkConfig}
	if coded, ok := errors.AsType[*cnitypes.Error](err); !ok || !slices.Contains(codes, coded.Code) || coded.Msg == "" {
		t.Fatalf("refused by %#v", err)
	}
}

// FuzzPrevResult gives results to CHECK, and to a chained ADD, which passes them on as they are.
func FuzzPrevResult(f *testing.F) {
	const whole = `"interfaces": [{"name": "cni0", "mac": "02:00:00:00:00:01"}, {"name": "eth0", "sandbox": "/run/netns/a", "mac": "02:00:00:00:00:02"}],
		"routes": [{"dst": "0.0.0.0/0", "gw": "10.88.0.1", "priority": 7, "table": 100, "scope": 0}], "dns": {"nameservers": ["192.0.2.53"]}`
	for _, seed := range []struct{ version, result string }{
		{"1.1.0", `{"cniVersion": "1.1.0", ` + whole + `, "ips": [{"interface": 1, "address": "10.88.0.7/16", "gateway": "10.88.0.1"}]}`},
		{"0.4.0", `{"cniVersion": "0.4.0", ` + whole + `, "ips": [{"version": "6", "interface": 1, "address": "fd00::7/64"}]}`},
		{"0.2.0", `{"cniVersion": "0.2.0", "ip4": {"ip": "10.88.0.7/16", "gateway": "10.88.0.1", "routes": [{"dst": "0.0.0.0/0"}]}}`},
		{"1.0.0", `{"cniVersion": "1.0.0", "interfaces": [null], "ips": [null], "routes": [null]}`},
		{"1.0.0", `{"cniVersion": "1.0.0", "ips": [{"interface": -1, "address": "::ffff:10.88.0.7/120"}, {"interface": 9, "address": "0.0.0.0/0"}]}`},
		{"0.4.0", `{"cniVersion": "0.4.0", "routes": [{}]}`},
		{"0.3.0", `{"cniVersion": "0.3.0", "ips": [{"version": "4"}]}`},
		{"1.0.0", `{}`}, {"1.0.0", `null`}, {"9.0.0", `{"cniVersion": "9.0.0"}`},
	} {
		f.Add(seed.version, seed.result)
	}
	f.Fuzz(func(t *testing.T, version, result string) {
		quoted, err := json.Marshal(version)
		if err != nil || !json.Valid([]byte(result)) || !slices.Contains(cniversion.All.SupportedVersions(), version) {
			return // the library refuses it before us, or the text would end the configuration
		}
		stdin := []byte(`{"cniVersion": ` + string(quoted) + `, "name": "pods", "type": "ebpfnet", "prevResult": ` + result + `}`)
		v, err := parseText(stdin)
		if err != nil {
			wantRefusal(t, err)
			return
		}
		if v.config.PrevResult == nil || v.config.CheckPosition() != nil || !v.isChained() {
			return
		}
		(&checker{verb: v}).expect()
		a := &adder{Plugin: &Plugin{Stdout: io.Discard}, verb: v}
		checkPassedOn(t, a, version, stdin)
	})
}

// checkPassedOn prints the result as ADD does and parses it again.
func checkPassedOn(t *testing.T, a *adder, version string, stdin []byte) {
	t.Helper()
	var out bytes.Buffer
	a.Stdout = &out
	if err := a.print(t.Context()); err != nil {
		return // this version cannot express it
	}
	var conf map[string]json.RawMessage
	if err := json.Unmarshal(stdin, &conf); err != nil {
		t.Fatal(err)
	}
	conf["prevResult"] = out.Bytes()
	text, err := json.Marshal(conf)
	if err != nil {
		t.Fatalf("ADD prints %s: %v", &out, err)
	}
	again, err := parseText(text)
	if err != nil {
		t.Fatalf("ADD prints what the next plugin refuses: %v: %s", err, &out)
	}
	if got, want := asJSON(t, again.config.PrevResult, version), asJSON(t, a.config.PrevResult, version); !reflect.DeepEqual(got, want) {
		t.Errorf("passed on as %s, was %s", got, want)
	}
}

func asJSON(t *testing.T, result *types100.Result, version string) string {
	t.Helper()
	var out bytes.Buffer
	if err := (*types100.Result)(result).PrintTo(&out); err != nil {
		t.Fatalf("print a result of version %s: %v", version, err)
	}
	return out.String()
}
