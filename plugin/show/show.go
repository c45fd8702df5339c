// Package show makes text from outside fit for a terminal and for a line of a log: names and values
// that a runtime, an image or another tool has chosen. Nothing there can move a cursor, start a line
// or hide a part of the text, and no message grows with a value.
//
// All text leaves through it: errors and logs of plugins in plugin/cni, what is printed in cmd/ebpfnetctl.
// It imports nothing of this module.
package show

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	longestValue   = 120  // characters of a value in a message
	longestMessage = 2048 // of a message: CHECK lists all differences
	cut            = "…"  // ends what is not shown whole
)

// Text quotes the characters that are not printed, as in a Go string. What it returns it leaves alone.
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
func Short(text string) string { return shorten(text, longestValue) }

// Value formats a value as a configuration writes it, as JSON, and cuts it like Short.
func Value(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return Short(fmt.Sprint(value))
	}
	return Short(string(text))
}

// Message returns a message in one line. Values that errors of libraries bring along are cut, too:
// they are words longer than any of ours.
func Message(text string) string {
	words := strings.Split(strings.ReplaceAll(text, "\n", "; "), " ")
	for i, word := range words {
		words[i] = Short(word)
	}
	return shorten(strings.Join(words, " "), longestMessage)
}

// shorten is Text, cut to a number of characters.
func shorten(text string, longest int) string {
	const longestEscape = len(`\U0010ffff`)

	text = Text(text[:min(len(text), longest*longestEscape)]) // more would not be shown
	for i := range text {
		if longest--; longest < 0 {
			return text[:i] + cut
		}
	}
	return text
}

// JSON escapes what encoding/json leaves as it is and terminals may obey.
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
