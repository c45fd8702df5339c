package testenv

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// onThread runs fn on a thread of its own that is thrown away afterwards, so that
// fn may change the thread's namespaces. A panic in fn, or a Goexit (which is what
// testing's FailNow does), continues in the caller. Goroutines that fn starts run
// elsewhere.
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
