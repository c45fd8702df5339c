// Command vm runs a program, most often a Go test binary, on another real
// Linux kernel: in a qemu guest that sees the host's own files.
//
//	go run ./vm -kernel 5.10 -- /abs/path/some.test -test.v -test.run X
//	go build -o /tmp/vm ./vm && go test -exec "/tmp/vm -kernel 5.10 --" ./...
//	go run ./vm -list
//
// Command matrix, in the folder below, runs all tests on all kernels with it. README.md has the results.
//
// go run turns every exit status but 0 into 1: build the runner if the status matters.
//
// The program runs as root, at its own path, with the working directory and the environment of the
// runner and an empty stdin. It sees the host's root file system copy-on-write: its writes are lost
// after the run, except below directories named with -share. The runner passes on its output and exits
// with its status, or with 128+N if signal N killed it. If the runner itself fails (no kernel, no boot,
// a kernel panic or oops, -timeout), it exits with 125 and prints the last lines of the guest's console.
// SIGQUIT, which go test sends to a test that takes too long, goes to the program; SIGINT, SIGTERM and
// SIGHUP end the guest.
//
// # How it works
//
// kernels.txt lists the kernels. apt fetches a kernel's packages from the machine's own mirror, but with
// separate sources and state. The runner unpacks them into the user's cache directory
// (ebpfnet/kernels/SERIES; delete that directory to fetch a newer release). The initramfs has this
// program, as the guest's init, and the modules that it needs to mount the host's root over 9p. The
// guest's kernel loads all other modules from the cache with /sbin/modprobe. Runner and guest communicate
// over one virtio serial port, with the frames of wire.go.
//
// The guest has neither KVM nor a network device. Under qemu's TCG, computing is 3 to 4 times slower than
// on the host and starting a process about 10 times: results mean something there, timings do not.
//
// The host must run Debian on amd64 with the packages qemu-system-x86, kmod, xz-utils, zstd and
// debian-archive-keyring.
//
// With -arch arm64 and qemu-system-arm, the kernel and the program are of that architecture, and so is this program
// in the directory arm64 beside the runner. The host's programs do not run there, modprobe among them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// exitFailed is the exit status if the runner failed and not the program.
const exitFailed = 125

type options struct {
	kernel   string
	arch     arch
	timeout  time.Duration
	memory   string
	cpus     int
	modules  string
	accel    string
	icount   bool
	shares   stringList
	console  bool
	list     bool
	download bool
	command  []string
}

// stringList is a flag that may be given several times.
type stringList []string

func (l *stringList) String() string     { return strings.Join(*l, ",") }
func (l *stringList) Set(s string) error { *l = append(*l, s); return nil }

// interrupted is the cause if a signal to the runner ended the run.
type interrupted struct{ signal syscall.Signal }

func (i interrupted) Error() string { return "interrupted: " + i.signal.String() }

func main() {
	if isGuestInit() {
		guestMain()
	}
	// The kernel kills qemu when the thread that started it ends (see startMachine): use the main thread.
	runtime.LockOSThread()

	opts, err := parseOptions(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(0)
	} else if err != nil {
		os.Exit(exitFailed)
	}
	status, err := run(opts)
	var byUser interrupted
	switch {
	case errors.As(err, &byUser):
		fmt.Fprintln(os.Stderr, "vm:", byUser)
		status = 128 + int(byUser.signal)
	case err != nil:
		fmt.Fprintln(os.Stderr, "vm:", err)
		status = exitFailed
	}
	os.Exit(status)
}

func parseOptions(args []string) (*options, error) {
	opts := options{arch: archs["amd64"]}
	flags := flag.NewFlagSet("vm", flag.ContinueOnError)
	flags.StringVar(&opts.kernel, "kernel", "", "kernel `series` to run on, see -list")
	flags.Func("arch", "`architecture` of the kernel and the program, amd64 (the default) or arm64", func(name string) error {
		a, ok := archs[name]
		if !ok {
			return fmt.Errorf("unknown architecture %q: expected amd64 or arm64", name)
		}
		opts.arch = a
		return nil
	})
	flags.DurationVar(&opts.timeout, "timeout", 5*time.Minute, "end the guest after this time, including boot")
	flags.StringVar(&opts.memory, "memory", "2G", "`size` of the guest's memory; files it writes count")
	flags.IntVar(&opts.cpus, "cpus", 2, "`number` of the guest's processors")
	flags.StringVar(&opts.modules, "modules", defaultModules, "comma-separated `names` of modules to load before the program starts")
	flags.StringVar(&opts.accel, "accel", "tcg,thread=single", "qemu's `accelerator`")
	flags.BoolVar(&opts.icount, "icount", false, "a nanosecond of the guest's clock is one instruction: for -cpus 1, and measurements without noise")
	flags.Var(&opts.shares, "share", "`directory` where the program's writes reach the host; repeatable")
	flags.BoolVar(&opts.console, "console", false, "show the guest's console on stderr")
	flags.BoolVar(&opts.list, "list", false, "list the kernels and exit")
	flags.BoolVar(&opts.download, "download", false, "only fetch the kernel into the cache")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: vm -kernel series [flags] -- program [argument ...]")
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	opts.command = flags.Args()
	needsCommand := !opts.list && !opts.download
	if needsCommand && len(opts.command) == 0 || !opts.list && opts.kernel == "" {
		flags.Usage()
		return nil, errors.New("missing kernel or program")
	}
	return &opts, nil
}

// run returns the program's exit status, or an error if the program did not run to its end.
func run(opts *options) (int, error) {
	kernels, err := parseKernels(kernelList)
	if err != nil {
		return 0, err
	}
	if opts.list {
		return 0, printKernels(kernels)
	}
	kernel, err := findKernel(kernels, opts.kernel)
	if err != nil {
		return 0, err
	}
	if err := checkHostTools(opts.arch); err != nil {
		return 0, err
	}

	kernel.flavour = opts.arch.name

	ctx, stop := interruptible()
	defer stop()

	image, err := cachedImage(ctx, kernel)
	if cause := context.Cause(ctx); cause != nil {
		return 0, cause
	}
	if err != nil {
		return 0, fmt.Errorf("get kernel %s: %w", kernel.series, err)
	}
	if opts.download {
		return 0, nil
	}
	return runInGuest(ctx, opts, image)
}

// interruptible returns a context that ends on SIGINT, SIGTERM and SIGHUP, with an [interrupted] as
// cause.
func interruptible() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		if s, ok := (<-signals).(syscall.Signal); ok {
			cancel(interrupted{s})
		}
	}()
	return ctx, func() { cancel(nil) }
}
