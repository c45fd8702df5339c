package drops

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
)

// Stack is the format of the tracepoint by which the kernel reports the packets that its stack drops.
type Stack struct {
	offsets map[string]uint32 // of the record's members
	names   map[uint32]string // of reasons
	symbols []symbol          // sorted; of functions
}

// StackFilter says which drops of the stack are reported.
type StackFilter struct {
	*Stack
	Reason string // "": all
}

// tracefs is where the kernel's trace file system is mounted.
var tracefs = []string{"/sys/kernel/tracing", "/sys/kernel/debug/tracing"}

const mountTracefs = "`mount -t tracefs tracefs /sys/kernel/tracing`"

// ReadStack reads the format. If there is none, the error says what to do.
func ReadStack() (*Stack, error) {
	for _, dir := range tracefs {
		text, err := os.ReadFile(filepath.Join(dir, "events/skb/kfree_skb/format"))
		if err == nil {
			return parseFormat(string(text))
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("no tracepoint skb/kfree_skb below %s: %s, if the kernel has it (CONFIG_TRACEPOINTS)", tracefs[0], mountTracefs)
}

var (
	formatField  = regexp.MustCompile(`field:[^;]*?(\w+);\toffset:(\d+);\tsize:(\d+);`)
	formatReason = regexp.MustCompile(`\{ *(\d+), *"(\w+)" *\}`)
)

func parseFormat(text string) (*Stack, error) {
	s := &Stack{offsets: map[string]uint32{}, names: map[uint32]string{}}
	for _, field := range formatField.FindAllStringSubmatch(text, -1) {
		offset, _ := strconv.ParseUint(field[2], 10, 16) // digits
		s.offsets[field[1]] = uint32(offset)
	}
	for _, reason := range formatReason.FindAllStringSubmatch(text, -1) {
		number, _ := strconv.ParseUint(reason[1], 10, 32)
		s.names[uint32(number)] = reason[2]
	}
	if s.offsets["skbaddr"] == 0 || s.offsets["location"] == 0 {
		return nil, errors.New("the kernel's tracepoint skb/kfree_skb has another format than expected: skbaddr and location")
	}
	return s, nil
}

// HasReasons reports whether the kernel has reasons (since 5.17), besides the function that drops.
func (s *Stack) HasReasons() bool { return s.offsets["reason"] != 0 }

func (f *StackFilter) config() (loader.StackDrops, error) {
	var netns unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &netns); err != nil {
		return loader.StackDrops{}, &os.PathError{Op: "stat", Path: "/proc/thread-self/ns/net", Err: err}
	}
	config := loader.StackDrops{
		Packet: f.offsets["skbaddr"], Location: f.offsets["location"], Reason: f.offsets["reason"],
		Wanted: loader.AnyReason, Netns: uint32(netns.Ino),
	}
	if f.Reason == "" {
		return config, nil
	}
	for number, name := range f.names {
		if f.Reason == name {
			config.Wanted = number
			return config, nil
		}
	}
	return config, fmt.Errorf("this kernel has no reason %s", f.Reason)
}

// reasonName returns the kernel's name of a reason, or "" if it has none.
func (s *Stack) reasonName(number uint32) string {
	if !s.HasReasons() {
		return ""
	}
	if name, ok := s.names[number]; ok {
		return name
	}
	return strconv.FormatUint(uint64(number), 10)
}

type symbol struct {
	address uint64
	name    string
}

// function returns the function at an address, or "" if the kernel hides it.
func (s *Stack) function(address uint64) string {
	if s.symbols == nil {
		s.symbols = readSymbols()
	}
	i, found := slices.BinarySearchFunc(s.symbols, address, func(s symbol, address uint64) int {
		return cmp.Compare(s.address, address)
	})
	if !found {
		i--
	}
	if i < 0 {
		return ""
	}
	return s.symbols[i].name
}

// readSymbols reads the addresses of functions. It never returns nil.
func readSymbols() []symbol {
	all := []symbol{}
	file, err := os.Open("/proc/kallsyms")
	if err != nil {
		return all
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		words := strings.Fields(lines.Text()) // address, type, name, [module]
		if len(words) < 3 || !strings.Contains("tTwW", words[1]) {
			continue
		}
		if address, err := strconv.ParseUint(words[0], 16, 64); err == nil && address != 0 { // 0: hidden
			all = append(all, symbol{address, words[2]})
		}
	}
	slices.SortFunc(all, func(a, b symbol) int { return cmp.Compare(a.address, b.address) })
	return all
}
