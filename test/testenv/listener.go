package testenv

import (
	"bufio"
	"fmt"
	"net/netip"
)

// listenerScript is a process that has a socket until its input ends. perl is part of
// every Debian, and no ancestor of a plugin that the test starts.
const listenerScript = `
use Socket qw(:all);
my ($ip, $port, $protocol) = @ARGV;
my $v6 = $ip =~ /:/;
socket(my $s, $v6 ? AF_INET6 : AF_INET, $protocol eq "tcp" ? SOCK_STREAM : SOCK_DGRAM, 0) or die $!;
setsockopt($s, IPPROTO_IPV6, IPV6_V6ONLY, 1) if $v6;
bind($s, $v6 ? pack_sockaddr_in6($port, inet_pton(AF_INET6, $ip)) : pack_sockaddr_in($port, inet_aton($ip))) or die $!;
if ($protocol eq "tcp") { listen($s, 1) or die $!; }
$| = 1;
print "ready\n";
<STDIN>;
`

// ForeignListener starts a process in the namespace that has a socket at the address, by
// "tcp" or "udp", and returns its pid. It ends with the test.
func ForeignListener(tb TB, ns *Namespace, protocol string, addr netip.AddrPort) (pid int) {
	tb.Helper()
	cmd := ns.Command(Context(tb), "perl", "-e", listenerScript, addr.Addr().String(), fmt.Sprint(addr.Port()), protocol)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	if err := ns.Do(cmd.Start); err != nil {
		tb.Fatalf("start a process that listens: %v", err)
	}
	tb.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			tb.Logf("the process that listened at %s: %v", addr, err)
		}
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "ready\n" {
		tb.Fatalf("a process that is to listen at %s says %q: %v", addr, line, err)
	}
	return cmd.Process.Pid
}
