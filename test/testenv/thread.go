package testenv

import (
	"fmt"
	"runtime"
	"runtime/debug"
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
