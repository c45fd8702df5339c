package testenv

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// The verifier needs seconds for the datapath, and most tests only want to have one. So a node that ends
// leaves its datapath, without an entry, to one that begins later: [Recycle] and [Preload].

// recycleDir has the pins of datapaths without a node.
const recycleDir = bpffsDir + "/recycled"

// recycled has the directories in recycleDir by what their datapaths were loaded with.
var recycled struct {
	sync.Mutex
	dirs  map[loadedWith][]string
	count int // of all so far
}

// loadedWith is all that distinguishes datapaths without entries: the configuration, but for the secret,
// and the number of flows.
type loadedWith struct {
	config bpf.HostConfig
	flows  uint32
}

func (with loadedWith) withoutSecret() loadedWith {
	with.config.Secret = [2]uint64{}
	return with
}

// Preload gives a node without a datapath a recycled one that is like one loaded with these options, if there
// is one.
func Preload(tb TB, node *Namespace, options loader.Options) {
	tb.Helper()
	if err := node.Do(func() error { return preload(options) }); err != nil {
		tb.Fatalf("give %s a recycled datapath: %v", node.Name, err)
	}
}

func preload(options loader.Options) error {
	recycled.Lock()
	defer recycled.Unlock()
	if len(recycled.dirs) == 0 {
		return nil
	}
	name, err := loader.NetnsName()
	if err != nil {
		return err
	}
	dir := filepath.Join(loader.Root, name)
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	with, err := loadingWith(options)
	if err != nil {
		return err
	}
	for dirs := recycled.dirs[with]; len(dirs) > 0; dirs = recycled.dirs[with] {
		recycled.dirs[with] = dirs[1:]
		if _, err := os.Stat(dirs[0]); errors.Is(err, fs.ErrNotExist) {
			continue // gone with its file system
		}
		return publish(dirs[0], dir)
	}
	return nil
}

// publish moves a recycled datapath to its node, unless a plugin has loaded another meanwhile.
func publish(recycled, dir string) error {
	if err := os.Mkdir(loader.Root, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	ctx, cancel := timeoutContext(Timeout)
	defer cancel()
	lock, err := flock.Acquire(ctx, loader.Root, flock.Exclusive)
	if err != nil {
		return err
	}
	defer lock.Release()
	if _, err := os.Stat(dir); err == nil {
		return os.RemoveAll(recycled)
	}
	return os.Rename(recycled, dir)
}

// loadingWith returns what the loader chooses in the calling thread's network namespace.
func loadingWith(options loader.Options) (loadedWith, error) {
	spec, err := specWith(options)
	if err != nil {
		return loadedWith{}, err
	}
	with := loadedWith{flows: spec.Maps[bpf.MapFlowTable].MaxEntries}
	err = spec.Variables[bpf.VarConfig].Get(&with.config)
	return with.withoutSecret(), err
}

// specWith is [loader.Spec], but reads the object only once.
func specWith(options loader.Options) (*ebpf.CollectionSpec, error) {
	programs := loader.Embedded()
	programs.Spec = func() (*ebpf.CollectionSpec, error) {
		spec, err := datapathSpec()
		return spec.Copy(), err
	}
	options.Programs = &programs
	return loader.Spec(options)
}

// Recycle takes the node's datapath, which must not have attachments any more, and keeps it for [Preload]. It
// takes the node's links down. It leaves a datapath alone that is not as this version's loader would make it.
func Recycle(tb TB, node *Namespace) {
	tb.Helper()
	err := setDown(node)
	if err == nil {
		err = node.Do(recycle)
	}
	for _, other := range []error{loader.ErrNotLoaded, loader.ErrIncompatible, ebpf.ErrMapIncompatible} {
		if errors.Is(err, other) {
			return
		}
	}
	if err != nil {
		tb.Fatalf("recycle the datapath of %s: %v", node.Name, err)
	}
}

// setDown keeps packets away from programs that are still attached.
func setDown(node *Namespace) error {
	links, err := rtnl.Links(node.Netlink())
	if err != nil {
		return err
	}
	for _, link := range links {
		if err := node.Netlink().LinkSetDown(link); err != nil && !errors.Is(err, unix.ENODEV) { // gone with its other end
			return fmt.Errorf("set %s down: %w", link.Attrs().Name, err)
		}
	}
	return nil
}

func recycle() error {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return err
	}
	defer datapath.Close()
	if datapath.Config.Build != bpf.Build {
		return nil
	}
	spec, err := specWith(loader.Options{MaxFlows: uint32(datapath.MaxFlows())})
	if err != nil {
		return err
	}
	for _, dir := range []string{"links", "progs"} {
		if err := removeOthers(filepath.Join(datapath.Dir(), dir), loader.BuildID(bpf.Build).String()); err != nil {
			return err
		}
	}
	if err := emptyMaps(filepath.Join(datapath.Dir(), "maps"), spec); err != nil {
		return err
	}
	if err := os.Mkdir(recycleDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	recycled.Lock()
	defer recycled.Unlock()
	recycled.count++
	dir := filepath.Join(recycleDir, strconv.Itoa(recycled.count))
	if err := os.Rename(datapath.Dir(), dir); err != nil {
		return err
	}
	if recycled.dirs == nil {
		recycled.dirs = map[loadedWith][]string{}
	}
	with := loadedWith{datapath.Config, datapath.FlowTable.MaxEntries()}.withoutSecret()
	recycled.dirs[with] = append(recycled.dirs[with], dir)
	return nil
}

// removeOthers removes all entries of a directory but one.
func removeOthers(dir, kept string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Name() == kept {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// removeRecycled removes all recycled datapaths.
func removeRecycled() error {
	clear(recycled.dirs)
	return os.RemoveAll(recycleDir)
}

// emptyMaps gives all maps that are pinned in a directory the content that they were created with.
func emptyMaps(dir string, spec *ebpf.CollectionSpec) error {
	for name, want := range spec.Maps {
		if name == ".rodata" { // constant
			continue
		}
		if err := emptyPinned(filepath.Join(dir, name), want); err != nil {
			return fmt.Errorf("empty map %s: %w", name, err)
		}
	}
	return nil
}

func emptyPinned(pin string, want *ebpf.MapSpec) error {
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		return err
	}
	defer m.Close()
	if err := want.Compatible(m); err != nil {
		return err
	}
	switch kind := m.Type(); kind {
	case ebpf.Hash, ebpf.LRUHash, ebpf.LPMTrie:
		return deleteAll(m)
	case ebpf.Array, ebpf.PerCPUArray:
		return zero(m)
	case ebpf.RingBuf:
		return drain(m)
	default:
		return errors.New("no rule for maps of type " + kind.String())
	}
}

// deleteAll walks the map until a walk finds no key.
func deleteAll(m *ebpf.Map) error {
	for {
		key, err := m.NextKeyBytes(nil)
		if key == nil || err != nil {
			return err
		}
		for key != nil {
			next, err := m.NextKeyBytes(key)
			if err != nil {
				return err
			}
			if err := m.Delete(key); err != nil {
				return err
			}
			key = next
		}
	}
}

// zero writes all elements, in batches where the kernel can.
func zero(m *ebpf.Map) error {
	n, size := int(m.MaxEntries()), int(m.ValueSize())
	if m.Type() == ebpf.PerCPUArray {
		return zeroEach(m, make([][]byte, ebpf.MustPossibleCPU()), size)
	}
	keys := make([]uint32, n)
	for i := range keys {
		keys[i] = uint32(i)
	}
	element := reflect.ArrayOf(size, reflect.TypeFor[byte]())
	_, err := m.BatchUpdate(keys, reflect.MakeSlice(reflect.SliceOf(element), n, n).Interface(), nil)
	return err
}

// zeroEach writes one element after the other, with a value for each CPU.
func zeroEach(m *ebpf.Map, values [][]byte, size int) error {
	for cpu := range values {
		values[cpu] = make([]byte, size)
	}
	for i := range m.MaxEntries() {
		if err := m.Put(i, values); err != nil {
			return err
		}
	}
	return nil
}

// drain reads all records of a ring.
func drain(m *ebpf.Map) error {
	reader, err := ringbuf.NewReader(m)
	if err != nil {
		return err
	}
	defer reader.Close()
	reader.SetDeadline(time.Unix(1, 0))
	for err == nil {
		_, err = reader.Read()
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}
