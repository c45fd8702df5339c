package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ebpfnet-ipam and the reference host-local, called as other plugins do, on the same files.
const (
	ownAllocator       = "./cmd/ebpfnet-ipam"
	referenceAllocator = "github.com/containernetworking/plugins/plugins/ipam/host-local"
)

// allocators are the environment in which both reserve addresses of one network.
type allocators struct {
	node, pod *testenv.Namespace
	conf      []byte
	dir       string // holds the reservations
}

func newAllocators(tb testing.TB, ranges ...string) *allocators {
	tb.Helper()
	var sets list
	for _, subnet := range ranges {
		sets = append(sets, list{object{"subnet": subnet}})
	}
	data := tb.TempDir()
	conf, err := json.Marshal(object{"cniVersion": "1.1.0", "name": "pods", "ipam": object{"type": "any", "dataDir": data, "ranges": sets}})
	testenv.Must(tb, err)
	a := &allocators{node: testenv.New(tb, "node"), pod: testenv.New(tb, "pod"), conf: conf, dir: filepath.Join(data, "pods")}
	testenv.Must(tb, os.Mkdir(a.dir, 0o755))
	return a
}

// call calls a verb for a container. The plugin is killed when ctx ends.
func (a *allocators) call(ctx context.Context, path, verb, id string) (*testenv.Call, error) {
	return a.node.Invoke(ctx, path, map[string]string{
		"CNI_COMMAND": verb, "CNI_CONTAINERID": id, "CNI_IFNAME": "eth0", "CNI_NETNS": a.pod.Path, "CNI_PATH": "/opt/cni/bin",
	}, a.conf)
}

func (a *allocators) mustCall(tb testing.TB, path, verb, id string) {
	tb.Helper()
	call, err := a.call(testenv.Context(tb), path, verb, id)
	if err == nil {
		err = call.Err()
	}
	if err != nil {
		tb.Fatalf("%s of %s by %s: %v", verb, id, path, err)
	}
}

// fill writes reservations of n containers, starting with an address.
func (a *allocators) fill(tb testing.TB, addr string, n int) {
	tb.Helper()
	next := netip.MustParseAddr(addr)
	for i := range n {
		testenv.Must(tb, os.WriteFile(filepath.Join(a.dir, next.String()), fmt.Appendf(nil, "other%d\r\neth0", i), 0o600))
		next = next.Next()
	}
}

// setLast sets the round robin's last address.
func (a *allocators) setLast(tb testing.TB, addr string) {
	tb.Helper()
	testenv.Must(tb, os.WriteFile(filepath.Join(a.dir, "last_reserved_ip.0"), []byte(addr), 0o600))
}

// TestAllocationCost counts the system calls of ADD, CHECK and DEL that name a reservation. They are as many
// beside 2000 reservations as beside 100, even if the round robin starts at the first of them.
func TestAllocationCost(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		t.Fatal("strace is missing: apt-get install strace")
	}
	path := testenv.Build(t, ownAllocator)
	const few, many = 100, 2000
	costs := map[int]map[string]int{}
	for _, n := range []int{few, many} {
		a := newAllocators(t, "10.1.0.0/16", "fd00::/64")
		a.fill(t, "10.1.0.2", n)
		a.mustCall(t, path, "DEL", "first") // builds the index
		a.setLast(t, "10.1.255.254")
		a.mustCall(t, path, "ADD", "second") // skips all of them
		a.setLast(t, "10.1.255.254")
		costs[n] = map[string]int{}
		for _, verb := range []string{"ADD", "CHECK", "DEL", "DEL"} {
			trace := filepath.Join(t.TempDir(), "trace")
			traced := wrapped(t, path, fmt.Sprintf(`exec strace -f -qq -o %s -e trace=%%file,getdents64 "$1"`, trace))
			a.mustCall(t, traced, verb, "c1")
			calls := testenv.ReadFile(t, trace)
			costs[n][verb] += strings.Count(string(calls), a.dir)
		}
	}
	for verb, calls := range costs[few] {
		if calls == 0 || costs[many][verb] != calls {
			t.Errorf("system calls of %s: %d beside %d reservations, %d beside %d; want the same, and at least 1", verb, calls, few, costs[many][verb], many)
		}
	}
}

// TestDirectorySharedWithHostLocal adds and deletes containers concurrently, by ebpfnet-ipam or by host-local
// at random, and kills some calls. No address is ever reserved for two containers, and none is lost.
func TestDirectorySharedWithHostLocal(t *testing.T) {
	const runtimes, steps = 4, 40
	a := newAllocators(t, "10.1.0.0/28", "fd00::/123")
	s := &sharing{allocators: a, paths: []string{testenv.Build(t, ownAllocator), testenv.Build(t, referenceAllocator)}, holders: map[netip.Addr]string{}}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var wg sync.WaitGroup
	for i := range runtimes {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			held := map[string][]netip.Addr{}
			for range steps {
				s.step(t, random, fmt.Sprintf("r%d-c%d", i, random.IntN(5)), held)
			}
			for id := range held {
				s.del(t, random, id, held)
			}
		})
	}
	wg.Wait()
	files, err := os.ReadDir(a.dir)
	testenv.Must(t, err)
	for _, file := range files {
		_, err := netip.ParseAddr(file.Name())
		content, _ := os.ReadFile(filepath.Join(a.dir, file.Name()))
		if err == nil && len(content) > 0 { // a killed host-local leaves empty ones
			t.Errorf("left behind: reservation %s of %q", file.Name(), content)
		}
	}
	const all = 13 // of the IPv4 range; some of them may have empty files
	for i := range all {
		a.mustCall(t, s.paths[0], "ADD", fmt.Sprintf("last%d", i))
	}
	call, err := a.call(testenv.Context(t), s.paths[0], "ADD", "one-more")
	testenv.Must(t, err)
	wantError(t, call, cnierr.CodeAddressesExhausted, "10.1.0.1-10.1.0.14")
}

// sharing is the state that all runtimes share.
type sharing struct {
	*allocators
	paths []string

	sync.Mutex
	holders map[netip.Addr]string // container by address
}

// step adds the container, or deletes it if it has addresses, by one of the allocators.
func (s *sharing) step(t *testing.T, random *rand.Rand, id string, held map[string][]netip.Addr) {
	const killed, again = 0, 1 // of 6
	path := s.paths[random.IntN(len(s.paths))]
	choice := random.IntN(6)
	_, has := held[id]
	switch {
	case has && choice == again:
		if call, err := s.call(testenv.Context(t), path, "ADD", id); err != nil || call.Exit == 0 {
			t.Errorf("second ADD of %s by %s: got %v, %s; want an error", id, path, err, call.Stdout)
		}
	case has:
		s.del(t, random, id, held)
	case choice == killed:
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(6000))*time.Microsecond)
		_, _ = s.call(ctx, path, "ADD", id)
		cancel()
		s.del(t, random, id, held)
	default:
		s.add(t, path, id, held)
	}
}

func (s *sharing) add(t *testing.T, path, id string, held map[string][]netip.Addr) {
	call, err := s.call(testenv.Context(t), path, "ADD", id)
	if err == nil {
		err = call.Err()
	}
	if isExhausted(err) {
		return
	}
	if err != nil {
		t.Errorf("ADD of %s by %s: %v", id, path, err)
		return
	}
	addrs := addresses(parseResult(t, call.Stdout))
	s.Lock()
	defer s.Unlock()
	for _, addr := range addrs {
		if holder := s.holders[addr]; holder != "" {
			t.Errorf("%s reserved %s for %s, but %s has it", path, addr, id, holder)
		}
		s.holders[addr] = id
	}
	held[id] = addrs
}

func isExhausted(err error) bool {
	var coded *types.Error
	return errors.As(err, &coded) && (coded.Code == cnierr.CodeAddressesExhausted || strings.Contains(coded.Msg, "no IP addresses available"))
}

func (s *sharing) del(t *testing.T, random *rand.Rand, id string, held map[string][]netip.Addr) {
	s.Lock()
	for _, addr := range held[id] {
		delete(s.holders, addr)
	}
	s.Unlock()
	delete(held, id)
	s.mustCall(t, s.paths[random.IntN(len(s.paths))], "DEL", id)
}
