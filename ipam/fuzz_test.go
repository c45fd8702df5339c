package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzParse checks that an accepted configuration is canonical: written with all defaults
// and read again it is the same. It also checks the invariants of the ranges.
func FuzzParse(f *testing.F) {
	f.Add("net", `{"ranges": [[{"subnet": "10.1.0.0/16"}], [{"subnet": "fd00::/64"}]]}`, "", "10.1.0.9")
	f.Add("net", `{"subnet": "10.1.0.0/30", "rangeStart": "10.1.0.2", "gateway": "10.9.9.9", "dataDir": "/x"}`, `[[{"subnet": "10.2.0.0/24"}]]`, "10.2.0.7/24")
	f.Add("net", `{"ranges": [[{"subnet": "10.1.0.0/24", "rangeEnd": "10.1.0.9"}, {"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10"}]]}`, "null", "")
	f.Add("net", `{"ranges": [[{"subnet": "0.0.0.0/0"}], [{"subnet": "::/0", "rangeEnd": "::ffff:1.2.3.4"}]]}`, "[]", "")
	f.Add("..", `{"ranges": [[{"subnet": "ffff::/16", "rangeStart": "ffff::"}]], "routes": [{"dst": "::/0", "gw": "ffff::1"}]}`, "", "ffff::2")

	f.Fuzz(func(t *testing.T, network, section, ranges, ip string) {
		req := Request{Ranges: json.RawMessage(ranges)}
		if ip != "" {
			req.IPs = []string{ip}
		}
		cfg, err := Parse(network, json.RawMessage(section), req)
		if err != nil {
			if !strings.HasPrefix(err.Error(), ErrConfig.Error()+": ") {
				t.Fatalf("got %v, want ErrConfig", err)
			}
			return
		}
		checkRanges(t, cfg.Ranges)

		section, req = unparse(t, cfg)
		again, err := Parse(cfg.Network, json.RawMessage(section), req)
		if err != nil {
			t.Fatalf("canonical form %s: %v", section, err)
		}
		if !reflect.DeepEqual(again, cfg) {
			t.Fatalf("canonical form %s:\n%+v\nwas:\n%+v", section, again, cfg)
		}
	})
}

func checkRanges(t *testing.T, sets []RangeSet) {
	for _, set := range sets {
		for _, r := range set {
			if !r.Subnet.Contains(r.Start) || !r.Subnet.Contains(r.End) || r.End.Less(r.Start) || r.Start == r.Subnet.Addr() {
				t.Fatalf("bad range %+v", r)
			}
		}
		for addr := range set.candidates(set[0].End, nil) {
			if !set.contains(addr) || set.isGateway(addr) {
				t.Fatalf("bad candidate %s of %s", addr, set)
			}
			break
		}
	}
}

// unparse writes a configuration with every possible key.
func unparse(t *testing.T, cfg *Config) (section string, req Request) {
	type object map[string]any
	var sets [][]object
	for _, set := range cfg.Ranges {
		var ranges []object
		for _, r := range set {
			ranges = append(ranges, object{"subnet": r.Subnet, "rangeStart": r.Start, "rangeEnd": r.End, "gateway": r.Gateway})
		}
		sets = append(sets, ranges)
	}
	bytes, err := json.Marshal(object{"ranges": sets, "dataDir": cfg.DataDir, "resolvConf": cfg.ResolvConf, "routes": cfg.Routes})
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range cfg.Requested {
		if addr.IsValid() {
			req.IPs = append(req.IPs, addr.String())
		}
	}
	return string(bytes), req
}

// FuzzRecord checks that records survive writing and reading, that a readable record is the
// same when written again, and that only torn content counts as torn.
func FuzzRecord(f *testing.F) {
	for _, seed := range []string{"", "c1", "c1\r\neth0", "c1\r\neth0\n", "c1\neth0", "\x00\x00", "c1\r\n", "a b", "c1\r\r\neth0", "c1\r\neth0\u00a0"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, content string) {
		a, err := decodeRecord([]byte(content))
		if err != nil {
			if checkAttachment(Attachment{content, "eth0"}) == nil {
				t.Fatalf("%q could be a container id, but is taken for torn", content)
			}
			return
		}
		again, err := decodeRecord(encodeRecord(a))
		if err != nil || again != a {
			t.Fatalf("%q reads as %q, then as %q, %v", content, a, again, err)
		}
		if whole := fmt.Sprintf("%s\r\n%s", a.ContainerID, a.IfName); a.IfName != "" && string(encodeRecord(a)) != whole {
			t.Fatalf("%q is not host-local's form of %q", encodeRecord(a), a)
		}
	})
}

// FuzzReservations adds a file of any name, content and mark to our reservations. Every holder
// keeps its address, and the index finds the same as reading all files.
func FuzzReservations(f *testing.F) {
	for _, seed := range []struct{ name, content, mark string }{
		{"10.1.0.2", "c1\r\neth0", ""},
		{"10.1.0.2", "c2\r\neth0", ""},
		{"10.1.0.2", "c2\r\neth0", "earlier"},
		{"10.1.0.2", "c1\r\neth0", "earlier"},
		{"10.1.0.2", "c1", "earlier"},
		{"10.1.0.2", "", "earlier"},
		{"10.1.0.1", "c1\r\neth0", ""},
		{"010.1.0.2", "c1\r\neth0", ""},
		{"fd00::2", "c1\r\neth0", ""},
		{"FD00:0::2", "c1\r\neth0", ""},
		{"fe80::1%a,b", "c1\r\neth0", ""},
		{"::ffff:10.1.0.2", "c1\r\neth0", ""},
		{"last_reserved_ip.0", "10.1.0.2", ""},
		{"last_reserved_ip.0", "\x00", ""},
		{".ebpfnet.tmp", "c1\r\neth0", ""},
		{"lock", "c1\r\neth0", ""},
		{"::%/", "0", "0"}, // not the name of "::%"
	} {
		f.Add(seed.name, seed.content, seed.mark)
	}
	f.Fuzz(func(t *testing.T, name, content, mark string) {
		pool, dir := newPool(t, `[[{"subnet": "10.1.0.0/30"}]]`) // whose one address is 10.1.0.2
		pool.boot = func() string { return "this" }
		path := filepath.Join(dir, name)
		if path != dir+"/"+name || os.WriteFile(path, []byte(content), 0o600) != nil {
			return // no name of a file
		}
		marked := unix.Setxattr(path, bootMark, []byte(mark), 0) == nil
		holder, err := decodeRecord([]byte(content))
		_, isAddr := netip.ParseAddr(name)
		isRecord := err == nil && isAddr == nil
		outlived := marked && mark != "" && mark != "this" && len(mark) <= maxMark && holder.IfName != ""

		me, all := Attachment{"c1", "eth0"}, Open(pool.cfg, Options{})
		result, err := pool.Reserve(t.Context(), me)
		switch {
		case err == nil && isRecord && name == "10.1.0.2" && !outlived:
			t.Fatalf("%v was assigned, but %s holds it", result.Addresses, holder)
		case errors.Is(err, ErrExhausted) && (!isRecord || name != "10.1.0.2" || outlived):
			t.Fatalf("10.1.0.2 was not assigned: %v", err)
		case errors.Is(err, ErrDuplicate) && !(isRecord && holder.ContainerID == me.ContainerID):
			t.Fatalf("%s holds nothing: %v", me, err)
		}
		found, _ := pool.Reserved(t.Context(), me)
		if read, _ := all.Reserved(t.Context(), me); !reflect.DeepEqual(found, read) {
			t.Fatalf("%s has %v by the index, and %v by reading all", me, found, read)
		}
		mustRelease(t, pool, me)
		mustRelease(t, pool, me) // what an old host-local may have written besides
		if read, _ := all.Reserved(t.Context(), me); read != nil {
			t.Fatalf("%s has %v after release", me, read)
		}
		if isOthers := isRecord && holder != me && holder != me.old() && !(outlived && name == "10.1.0.2"); isOthers && readDir(t, dir)[name] != content {
			t.Fatalf("%s lost %s", holder, name)
		}
	})
}
