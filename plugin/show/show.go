// Package show escapes text from outside for terminals and logs: names and values from a runtime, an
// image or another tool. They cannot move a cursor, start a line or hide a part of the text, and long
// values are cut.
//
// All text leaves through it: errors and logs of plugins in plugin/cni, what is printed in cmd/ebpfnetctl.
package show

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	maxValueLen = 120  // characters of a value in a message
	maxMessage  = 2048 // of a message: CHECK lists all differences
	cut         = "…"  // ends what is not shown whole
)

// Text escapes the characters that are not printable, as in a Go string. It is idempotent.
func Text(text string) string {
	if isPrintable(text) {
		return text
	}
	var quoted []byte
	for len(text) > 0 {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			quoted = fmt.Appendf(quoted, `\x%02x`, text[0])
		case strconv.IsPrint(r):
			quoted = append(quoted, text[:size]...)
		default:
			escape := strconv.QuoteRuneToASCII(r)
			quoted = append(quoted, escape[1:len(escape)-1]...)
		}
		text = text[size:]
	}
	return string(quoted)
}

func isPrintable(text string) bool {
	hidden := func(r rune) bool { return !strconv.IsPrint(r) }
	return utf8.ValidString(text) && !strings.ContainsFunc(text, hidden)
}

// Short is Text, cut to a length that a message can hold.
func Short(text string) string { return shorten(text, maxValueLen) }

// Value formats a value as a configuration writes it, as JSON, and cuts it like Short.
func Value(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return Short(fmt.Sprint(value))
	}
	return Short(string(text))
}

// Message returns a message in one line. It also cuts very long words, which are values in errors of
// libraries.
func Message(text string) string {
	words := strings.Split(strings.ReplaceAll(text, "\n", "; "), " ")
	for i, word := range words {
		words[i] = Short(word)
	}
	return shorten(strings.Join(words, " "), maxMessage)
}

// shorten is Text, cut to a number of characters.
func shorten(text string, longest int) string {
	const maxEscapeLen = len(`\U0010ffff`)

	text = Text(text[:min(len(text), longest*maxEscapeLen)]) // more would not be shown
	for i := range text {
		if longest--; longest < 0 {
			return text[:i] + cut
		}
	}
	return text
}

// JSON escapes the control characters that encoding/json does not escape.
func JSON(text []byte) []byte {
	escaped := make([]byte, 0, len(text))
	for _, r := range string(text) {
		if strconv.IsPrint(r) || r == '\n' {
			escaped = utf8.AppendRune(escaped, r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			escaped = fmt.Appendf(escaped, `\u%04x`, unit)
		}
	}
	return escaped
}

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
