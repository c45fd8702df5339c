package testenv

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// backlogAttempts bounds how often a test tries to find the machine quiet.
const backlogAttempts = 5

// WithoutBacklogDrops does what loses no packet. All namespaces of a machine share one queue of each CPU
// (net.core.netdev_max_backlog), which another test may fill. Where do fails, and packets were dropped there meanwhile, that
// says nothing: it is done again. attempt counts from 0.
func WithoutBacklogDrops(tb TB, do func(attempt int) error) error {
	tb.Helper()
	return withoutDrops(tb, backlogDrops, do)
}

func withoutDrops(tb TB, drops func() (uint32, error), do func(attempt int) error) error {
	tb.Helper()
	for attempt := 0; ; attempt++ {
		before, errBefore := drops()
		err := do(attempt)
		after, errAfter := drops()
		if err == nil || errBefore != nil || errAfter != nil || after == before {
			return errors.Join(err, errBefore, errAfter)
		}
		err = fmt.Errorf("attempt %d, while the queues of the CPUs dropped %d packets: %w", attempt+1, after-before, err)
		if attempt+1 == backlogAttempts {
			return err
		}
		tb.Logf("%v", err)
	}
}

// DrainBacklog waits until no packet waits in the queues of the CPUs, so what was sent before has arrived.
func DrainBacklog(tb TB) {
	tb.Helper()
	Eventually(tb, "empty queues of the CPUs", func() error {
		waiting, err := readBacklog(11)
		if err == nil && waiting > 0 {
			err = fmt.Errorf("%d packets wait", waiting)
		}
		return err
	})
}

// backlogDrops counts the packets that found the queue of a CPU full.
func backlogDrops() (uint32, error) { return readBacklog(1) }

func readBacklog(column int) (uint32, error) {
	text, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		return 0, err
	}
	return parseBacklog(string(text), column)
}

// parseBacklog adds up a column. All are hexadecimal. Each CPU has a line.
func parseBacklog(text string, column int) (sum uint32, err error) {
	for line := range strings.Lines(text) {
		columns := strings.Fields(line)
		if len(columns) <= column {
			return 0, fmt.Errorf("line %q: want more columns", line)
		}
		ofCPU, err := strconv.ParseUint(columns[column], 16, 32)
		if err != nil {
			return 0, err
		}
		sum += uint32(ofCPU) // it wraps, like the kernel's
	}
	return sum, nil
}
