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
	if c.LogFile != "" && !filepath.IsAbs(c.LogFile) {
		return cnierr.Invalid("logFile", c.LogFile, "the absolute path of a file")
	}
	if env := os.Getenv(logFileEnv); c.LogFile == "" && env != "" && !filepath.IsAbs(env) {
		return cnierr.InvalidEnv(logFileEnv, env, "the absolute path of a file")
	}
	if _, ok := logLevels[c.LogLevel]; c.LogLevel != "" && !ok {
		return cnierr.Invalid("logLevel", c.LogLevel, strings.Join(slices.Sorted(maps.Keys(logLevels)), ", "))
	}
	return nil
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
	if !filepath.IsAbs(file) { // Parse refuses it
		file = ""
	}
	return file, level, isSet
}
