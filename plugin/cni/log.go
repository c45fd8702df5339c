package cni

import (
	"errors"
	"log/slog"
	"os"
	"strings"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/show"
	"github.com/ebpfnet/ebpfnet/plugin/version"
)

// callLog is the log of one call. It goes to a file or to stderr, which runtimes show when a call
// fails; stdout is for results alone.
type callLog struct {
	*slog.Logger
	file     *os.File // nil: stderr
	logsCall bool     // whether the call itself gets a line
}

// openLog opens the configured log, or stderr if that fails.
func openLog(call *config.Call) *callLog {
	path, level, isSet := call.Log()
	log := &callLog{Logger: show.NewLogger(os.Stderr, level), logsCall: isSet}
	if path == "" {
		return log
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NONBLOCK, 0o640) // it may be a pipe by now
	if err != nil {
		log.Warn("logFile "+show.Value(path)+": expected a file that can be written; logging to stderr", "error", err)
		return log
	}
	return &callLog{Logger: show.NewLogger(file, level).With("pid", os.Getpid()), file: file, logsCall: true}
}

// writeKeys writes a line about the ignored keys, and one about those of other tools.
func (l *callLog) writeKeys(call *config.Call) {
	if keys := call.IgnoredKeys(); len(keys) > 0 {
		l.Warn("ebpfnet does not need these keys", "keys", strings.Join(keys, "; "))
	}
	if keys := call.ForeignKeys(); len(keys) > 0 {
		l.Info("left these keys to others", "keys", strings.Join(keys, "; "))
	}
}

// writeCall writes a line with the call and its outcome.
func (l *callLog) writeCall(verb string, call *config.Call, took time.Duration, err error) {
	if !l.logsCall {
		return
	}
	log := l.Logger
	for _, attr := range [][2]string{
		{"network", call.Network()}, {"container", call.ContainerID}, {"interface", call.IfName}, {"netns", call.Netns},
		{"traceparent", os.Getenv("TRACEPARENT")}, // of a runtime that traces
	} {
		if attr[1] != "" {
			log = log.With(attr[0], attr[1])
		}
	}
	log = log.With("took", took.Round(time.Microsecond), "version", version.String())
	if coded, ok := errors.AsType[*cnitypes.Error](err); ok {
		log.Error(verb+" failed", "code", coded.Code, "error", coded.Msg, "details", coded.Details)
		return
	}
	log.Info(verb)
}

func (l *callLog) close() {
	if l.file != nil {
		_ = l.file.Close()
	}
}
