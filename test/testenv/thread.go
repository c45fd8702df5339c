package testenv

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// onThread runs fn on a new thread and ends that afterwards, so that fn may change the thread's
// namespaces. A panic or Goexit in fn (as in testing's FailNow) continues in the caller. Goroutines
// that fn starts run on other threads.
func onThread(fn func() error) (err error) {
	var (
		done     = make(chan struct{})
		returned bool
		panicked any
		stack    []byte
	)
	go func() {
		defer close(done)
		// Never unlocked: the thread ends with the goroutine.
		runtime.LockOSThread()
		defer func() {
			if !returned {
				panicked, stack = recover(), debug.Stack()
			}
		}()
		err = fn()
		returned = true
	}()
	<-done
	switch {
	case panicked != nil:
		panic(fmt.Sprintf("%v\n\n%s", panicked, stack))
	case !returned:
		runtime.Goexit()
	}
	return err
}

// UsableCPUs returns the CPUs on which the calling thread may run.
func UsableCPUs() (cpus []int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("read this thread's CPUs: %w", err)
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}

// PinThread keeps the calling thread on one of its CPUs, for the rest of the thread's life.
func PinThread(number int) error {
	cpus, err := UsableCPUs()
	if err != nil {
		return err
	}
	var only unix.CPUSet
	only.Set(cpus[number%len(cpus)])
	if err := unix.SchedSetaffinity(0, &only); err != nil {
		return fmt.Errorf("choose CPU %d: %w", cpus[number%len(cpus)], err)
	}
	return nil
}
