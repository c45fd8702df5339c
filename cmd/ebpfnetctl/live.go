package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/screen"
)

// live shows a picture on a terminal until somebody has seen enough. Elsewhere it prints again and again,
// until the command is ended.
func live(cmd *cobra.Command, p *output.Printer, interval time.Duration, print func(*output.Printer) error) error {
	out, isFile := cmd.OutOrStdout().(*output.File)
	if isFile && p.IsTerminal() && !p.ForPrograms() {
		return screen.Run(cmd.Context(), os.Stdin, out.File, interval, func(to io.Writer, columns, _ int) error {
			return print(p.On(to, columns))
		})
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if err := print(p); err != nil {
			return err
		}
		if !isNext(cmd.Context(), ticker) {
			return nil
		}
	}
}

func isNext(ctx context.Context, ticker *time.Ticker) bool {
	select {
	case <-ctx.Done():
		return false
	case <-ticker.C:
		return true
	}
}

// checkInterval refuses an interval that would keep a CPU busy, or never ends.
func checkInterval(command string, interval time.Duration) error {
	const shortest, longest = 100 * time.Millisecond, time.Hour

	if interval < shortest || interval > longest {
		return usageError{fmt.Errorf("%s: --interval %s: expected %s to %s", command, interval, shortest, longest)}
	}
	return nil
}
