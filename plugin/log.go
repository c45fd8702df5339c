package plugin

import (
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
)

// Stdout is for results alone, so the plugin's words go to stderr, which runtimes keep
// where a call fails, or to a file.

// logLevels are the values of logLevel.
var logLevels = map[string]slog.Level{
	"debug": slog.LevelDebug, // each step
	"info":  slog.LevelInfo,  // each call
	"warn":  slog.LevelWarn,
	"error": slog.LevelError, // calls that failed
}

// logConf is what a configuration says of the log.
type logConf struct {
	File  string `json:"logFile"`
	Level string `json:"logLevel"`
}

// logFileEnv names the file where the configuration names none.
const logFileEnv = "CNI_LOG_FILE"

func (c logConf) check() error {
	if c.File != "" && !filepath.IsAbs(c.File) {
		return invalid("logFile", c.File, "the absolute path of a file")
	}
	if env := os.Getenv(logFileEnv); c.File == "" && env != "" && !filepath.IsAbs(env) {
		return invalidEnv(logFileEnv, env, "the absolute path of a file")
	}
	if _, known := logLevels[c.Level]; c.Level != "" && !known {
		return invalid("logLevel", c.Level, strings.Join(slices.Sorted(maps.Keys(logLevels)), ", "))
	}
	return nil
}

// callLog is the log of one call.
type callLog struct {
	*slog.Logger
	file  *os.File // nil: stderr
	calls bool     // the call itself is worth a line
}

// openLog opens the log that a configuration asks for, right or wrong: a call that could do its
// work does not fail for a log.
func openLog(stdin []byte) *callLog {
	var conf logConf
	_ = json.Unmarshal(stdin, &conf)
	path := cmp.Or(conf.File, os.Getenv(logFileEnv))
	level, asked := logLevels[conf.Level]
	if !asked && path != "" {
		level = slog.LevelInfo
	}
	if !asked && path == "" {
		level = slog.LevelWarn
	}
	log := &callLog{Logger: newLogger(os.Stderr, level), calls: asked}
	if !filepath.IsAbs(path) { // an ADD is refused for it
		return log
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	if err != nil {
		log.Warn("logFile "+show(path)+": expected a file that can be written; the log is on stderr", "error", err)
		return log
	}
	return &callLog{Logger: newLogger(file, level).With("pid", os.Getpid()), file: file, calls: true}
}

func newLogger(to io.Writer, level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(to, &slog.HandlerOptions{Level: level}))
}

// call writes what was asked for, and what became of it.
func (l *callLog) call(verb string, args *skel.CmdArgs, took time.Duration, err error) {
	if !l.calls {
		return
	}
	var conf struct {
		Name string `json:"name"`
	}
	_ = json.Unmarshal(args.StdinData, &conf)
	log := l.Logger
	for _, attr := range [][2]string{
		{"network", conf.Name}, {"container", args.ContainerID}, {"interface", args.IfName}, {"netns", args.Netns},
		{"traceparent", os.Getenv("TRACEPARENT")}, // of a runtime that traces
	} {
		if attr[1] != "" {
			log = log.With(attr[0], attr[1])
		}
	}
	log = log.With("took", took.Round(time.Microsecond))
	var coded *cnitypes.Error
	if errors.As(err, &coded) {
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
