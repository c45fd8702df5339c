package show

import (
	"io"
	"log/slog"
)

// NewLogger returns a log of lines of text.
func NewLogger(to io.Writer, level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(to, &slog.HandlerOptions{Level: level, ReplaceAttr: showAttr}))
}

// showAttr escapes and shortens the texts of a line.
func showAttr(_ []string, attr slog.Attr) slog.Attr {
	switch value := attr.Value.Any().(type) {
	case string:
		attr.Value = slog.StringValue(Message(value))
	case error:
		attr.Value = slog.StringValue(Message(value.Error()))
	}
	return attr
}
