package namespace

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// row is a line of /proc/net/tcp, of which the kernel prints the words of addresses as this machine's
// numbers.
func row(local, remote string, state uint8) string {
	return fmt.Sprintf("   0: %s %s %02X 00000000:00000000 02:000001DB 00000000     0        0 29514 2 0000000000000000 20 4 30 10 -1\n",
		printed(local), printed(remote), state)
}

func printed(text string) (p string) {
	addrPort := netip.MustParseAddrPort(text)
	for bytes := addrPort.Addr().AsSlice(); len(bytes) > 0; bytes = bytes[4:] {
		p += fmt.Sprintf("%08X", binary.NativeEndian.Uint32(bytes))
	}
	return fmt.Sprintf("%s:%04X", p, addrPort.Port())
}

func TestOpenedSockets(t *testing.T) {
	var s sockets
	for _, file := range []struct {
		protocol uint8
		rows     []string
	}{
		{unix.IPPROTO_TCP, []string{
			row("10.88.0.2:40001", "10.88.0.3:80", 1),
			row("10.88.0.2:40002", "10.88.0.3:80", 2),  // SYN sent
			row("10.88.0.2:40003", "10.88.0.3:80", 3),  // SYN received
			row("10.88.0.2:40004", "10.88.0.3:80", 4),  // FIN wait
			row("10.88.0.2:40005", "10.88.0.3:80", 5),  // FIN wait
			row("10.88.0.2:40006", "10.88.0.3:80", 6),  // time wait
			row("10.88.0.2:40007", "10.88.0.3:80", 7),  // close
			row("10.88.0.2:40008", "10.88.0.3:80", 8),  // close wait
			row("10.88.0.2:40009", "10.88.0.3:80", 9),  // last ACK
			row("10.88.0.2:40010", "10.88.0.3:80", 11), // closing
			row("10.88.0.2:8080", "10.88.0.3:50000", 1),
			row("10.88.0.2:9090", "10.88.0.3:50000", 1),
			row("127.0.0.1:40011", "127.0.0.1:8081", 1),
			row("10.88.0.2:40012", "10.88.0.2:8081", 1),
			row("0.0.0.0:9090", "0.0.0.0:0", 10),
		}},
		{unix.IPPROTO_TCP, []string{
			row("[::]:8080", "[::]:0", 10),
			row("[::ffff:10.88.0.2]:8080", "[::ffff:10.88.0.3]:50001", 1),
			row("[::ffff:10.88.0.2]:40020", "[::ffff:10.88.0.3]:80", 1),
			row("[fd00:88::2]:40021", "[fd00:88::1:3]:80", 1),
			row("[fd00:88::2]:8080", "[fd00:88::3]:50002", 1),
			row("[::1]:40022", "[::1]:8080", 1),
		}},
		{unix.IPPROTO_UDP, []string{
			row("10.88.0.2:40030", "10.88.0.3:53", 1),
			row("10.88.0.2:8080", "10.88.0.3:53", 1), // TCP's port
			row("10.88.0.2:53", "10.88.0.3:50000", 1),
			row("0.0.0.0:53", "0.0.0.0:0", 7),
		}},
		{unix.IPPROTO_UDP, []string{row("[fd00:88::2]:40031", "[fd00:88::3]:53", 1)}},
	} {
		found, err := read(strings.NewReader("  sl  local_address rem_address   st\n"+strings.Join(file.rows, "")), file.protocol)
		if err != nil {
			t.Fatal(err)
		}
		s.add(found)
	}
	var got []string
	opened, accepted := s.split()
	for _, c := range opened {
		got = append(got, fmt.Sprintf("%d %s %s", c.Protocol, c.Local, c.Remote))
	}
	want := []string{
		"6 10.88.0.2:40001 10.88.0.3:80",
		"6 10.88.0.2:40002 10.88.0.3:80",
		"6 10.88.0.2:40004 10.88.0.3:80",
		"6 10.88.0.2:40005 10.88.0.3:80",
		"6 10.88.0.2:40008 10.88.0.3:80",
		"6 10.88.0.2:40020 10.88.0.3:80",
		"6 [fd00:88::2]:40021 [fd00:88::1:3]:80",
		"17 10.88.0.2:40030 10.88.0.3:53",
		"17 10.88.0.2:8080 10.88.0.3:53",
		"17 [fd00:88::2]:40031 [fd00:88::3]:53",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	ports := map[uint16]int{} // local ones of accepted connections
	for _, c := range accepted {
		ports[c.Local.Port()]++
	}
	if want := map[uint16]int{8080: 3, 9090: 1, 53: 1}; !maps.Equal(ports, want) {
		t.Errorf("accepted by ports %v, want %v", ports, want)
	}
}

// The kernel's own text, of a machine whose lowest byte comes first.
func TestParseAddrPort(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return // TestOpenedSockets is for both
	}
	for text, want := range map[string]string{
		"0200580A:1F90":                         "10.88.0.2:8080",
		"0000000000000000FFFF00000200580A:01BB": "10.88.0.2:443",
		"B80D0120010000000000000002000000:C350": "[2001:db8:0:1::2]:50000",
	} {
		got, err := parseAddrPort(text)
		if err != nil || got.String() != want {
			t.Errorf("%s: got %v, %v, want %s", text, got, err, want)
		}
	}
}

// TestReadSocket reads the kernel's own lines of the files of TCP and UDP.
func TestReadSocket(t *testing.T) {
	for _, test := range []struct {
		protocol uint8
		line     string // %s: the local address
		local    string
		state    uint8
		inode    uint64
	}{
		{unix.IPPROTO_TCP, "   1: %s 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 18446744073709551615 1 0000000000000000 100 0 0 10 0", "192.0.2.1:8080", 10, 1<<64 - 1},
		{unix.IPPROTO_TCP, "   2: %s 0100007F:A3F2 06 00000000:00000000 03:00000F2E 00000000     0        0 0 3 0000000000000000", "192.0.2.1:8080", 6, 0},
		{unix.IPPROTO_UDP, " 1234: %s 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000   107        0 29514 2 0000000000000000 0", "[2001:db8::1]:53", 7, 29514},
	} {
		got, err := read(strings.NewReader("heading\n"+fmt.Sprintf(test.line, printed(test.local))+"\n"), test.protocol)
		if err != nil || len(got) != 1 || got[0].Protocol != test.protocol || got[0].Local.String() != test.local || got[0].State != test.state || got[0].Inode != test.inode {
			t.Errorf("%s: got %+v, %v; want state %d, inode %d", test.local, got, err, test.state, test.inode)
		}
	}
}

func TestReadRefusesUnknownText(t *testing.T) {
	const rest = " 00000000:00000000 00:00000000 00000000 0 0 29514"

	for _, line := range []string{
		"0: 0200580A:1F90 0300580A:0050 01",
		"0: 0200580A:1F90 0300580A:0050 01 00000000:00000000 00:00000000 00000000 0 0",
		"0: 0200580A:1F90 0300580A:0050 01 00000000:00000000 00:00000000 00000000 0 0 2951F",
		"0: 0200580A:1F90 0300580A:0050 XX" + rest,
		"0: 0200580A 0300580A:0050 01" + rest,
		"0: 0200580A00:1F90 0300580A:0050 01" + rest,
		"0: 0200580A0300580A:1F90 0300580A:0050 01" + rest,
		"0: 0200580A:1F90 0300580G:0050 01" + rest,
		"0: :1F90 0300580A:0050 01" + rest,
	} {
		if _, err := read(strings.NewReader("heading\n"+line+"\n"), unix.IPPROTO_TCP); err == nil {
			t.Errorf("%q: got no error", line)
		}
	}
	if _, err := read(strings.NewReader("heading\n0: 0200580A:1F90 0300580A:0050 01"+rest+"\n"), unix.IPPROTO_TCP); err != nil {
		t.Error(err)
	}
}
