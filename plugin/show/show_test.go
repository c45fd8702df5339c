package show

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

const escapes = "\x1b]0;title\a\x1b[2J\r\n\t\x7f\u009b31m\u202e\u2028\ufeff\xff"

func TestText(t *testing.T) {
	for text, want := range map[string]string{
		"":                 "",
		"web":              "web",
		"größe 世界 🙂":       "größe 世界 🙂",
		`C:\x1b "a" <b>`:   `C:\x1b "a" <b>`,
		"a\x1b[2Jb":        `a\x1b[2Jb`,
		"a\r\nb\tc\x00\a":  `a\r\nb\tc\x00\a`,
		"\x7f\u009b31m":    `\x7f\u009b31m`,
		"abc\u202edef":     `abc\u202edef`,
		"\u00a0\U000e0041": `\u00a0\U000e0041`,
		"a\xffb\xc3":       `a\xffb\xc3`,
		"\ufffd":           "\ufffd",
	} {
		if got := Text(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

func TestValue(t *testing.T) {
	for _, test := range []struct {
		value any
		want  string
	}{
		{"web", `"web"`},
		{7, "7"},
		{json.RawMessage(`{ "a":  [1] }`), `{"a":[1]}`},
		{"\x1b\u009b", `"\u001b\u009b"`},
		{strings.Repeat("a", 1_600_000), `"` + strings.Repeat("a", 119) + "…"},
		{strings.Repeat("世", 200), `"` + strings.Repeat("世", 119) + "…"},
		{strings.Repeat("\u009b", 200), `"` + strings.Repeat(`\u009b`, 19) + `\u009` + "…"},
	} {
		if got := Value(test.value); got != test.want {
			t.Errorf("%.50v: got %s, want %s", test.value, got, test.want)
		}
	}
}

func TestMessage(t *testing.T) {
	long := strings.Repeat("a", 1_600_000)
	for text, want := range map[string]string{
		"":                      "",
		"one\ntwo":              "one; two",
		"no file\x1b[2J":        `no file\x1b[2J`,
		"parse " + long + ": x": "parse " + long[:120] + "… x",
	} {
		if got := Message(text); got != want {
			t.Errorf("%.50q: got %.500q, want %.500q", text, got, want)
		}
	}
	if got := Message(strings.Repeat("word ", 1_000_000)); utf8.RuneCountInString(got) != maxMessage+1 {
		t.Errorf("got %d characters", len(got))
	}
}

func TestJSON(t *testing.T) {
	text, err := json.MarshalIndent(map[string]string{"a": escapes + "🙂\U000e0041"}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	safe := string(JSON(text))
	for line := range strings.SplitSeq(safe, "\n") {
		if Text(line) != line {
			t.Errorf("not printable: %q", line)
		}
	}
	var before, after any
	if err := json.Unmarshal([]byte(safe), &after); err != nil {
		t.Fatalf("%v: %s", err, safe)
	}
	if _ = json.Unmarshal(text, &before); before.(map[string]any)["a"] != after.(map[string]any)["a"] {
		t.Errorf("got %q, want %q", after, before)
	}
}

// FuzzShow requires of any text that what is shown is printable, in one line, short, and stays as it is when it is
// shown again.
func FuzzShow(f *testing.F) {
	for _, text := range []string{"", "web", escapes, "größe", strings.Repeat("\x1b[2J", 100), strings.Repeat("a b", 5000), "a\xff\n\xc3"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for name, shown := range map[string]struct {
			again   func(string) string
			longest int
		}{
			"Text":    {Text, len(text) * 10},
			"Short":   {Short, maxValueLen + 1},
			"Message": {Message, maxMessage + 1},
		} {
			got := shown.again(text)
			for _, r := range got {
				if !strconv.IsPrint(r) {
					t.Fatalf("%s(%q): got %q, which has %q", name, text, got, r)
				}
			}
			if !utf8.ValidString(got) || utf8.RuneCountInString(got) > shown.longest {
				t.Errorf("%s(%q): got %q", name, text, got)
			}
			if again := Text(got); again != got {
				t.Errorf("%s(%q): got %q, then %q", name, text, got, again)
			}
		}
		if utf8.ValidString(text) && isPrintable(text) && Text(text) != text {
			t.Errorf("changed %q", text)
		}
		value, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		var same string
		if err := json.Unmarshal(JSON(value), &same); err != nil || same != strings.ToValidUTF8(text, "\ufffd") && utf8.ValidString(text) {
			t.Errorf("JSON(%q): got %q, %v", text, same, err)
		}
	})
}
