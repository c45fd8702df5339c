package config

import (
	"cmp"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// logFileEnv names the log file where the configuration names none.
const logFileEnv = "CNI_LOG_FILE"

var logLevels = map[string]slog.Level{
	"debug": slog.LevelDebug, // each step
	"info":  slog.LevelInfo,  // each call
	"warn":  slog.LevelWarn,
	"error": slog.LevelError, // failed calls
}

type logConf struct {
	LogFile  string `json:"logFile"`
	LogLevel string `json:"logLevel"`
}

func (c logConf) check() error {
	const expected = "the absolute path of a regular file"
	if c.LogFile != "" && !mayBeLogFile(c.LogFile) {
		return cnierr.Invalid("logFile", c.LogFile, expected)
	}
	if env := os.Getenv(logFileEnv); c.LogFile == "" && env != "" && !mayBeLogFile(env) {
		return cnierr.InvalidEnv(logFileEnv, env, expected)
	}
	if _, ok := logLevels[c.LogLevel]; c.LogLevel != "" && !ok {
		return cnierr.Invalid("logLevel", c.LogLevel, strings.Join(slices.Sorted(maps.Keys(logLevels)), ", "))
	}
	return nil
}

// mayBeLogFile reports whether the path is absolute and has a regular file, or none yet. A pipe without a reader would
// block each call, and opening a device may change it.
func mayBeLogFile(path string) bool {
	info, err := os.Stat(path)
	return filepath.IsAbs(path) && (err != nil || info.Mode().IsRegular())
}

// Log returns the log file, "" for stderr, and the level. isSet is false for a level that the
// configuration does not set. Unlike Parse it ignores what is wrong: a call that could do its work
// does not fail for its log.
func (c *Call) Log() (file string, level slog.Level, isSet bool) {
	file = cmp.Or(c.text("logFile"), os.Getenv(logFileEnv))
	level, isSet = logLevels[c.text("logLevel")]
	if !isSet && file == "" {
		level = slog.LevelWarn
	}
	if !mayBeLogFile(file) { // Parse refuses it
		file = ""
	}
	return file, level, isSet
}
