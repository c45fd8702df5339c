package testenv

import (
	"os"
	"regexp"
)

var shellBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")

// Commands returns a document's blocks of shell commands, in their order.
func Commands(tb TB, file string) (blocks []string) {
	tb.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	for _, match := range shellBlock.FindAllSubmatch(text, -1) {
		blocks = append(blocks, string(match[1]))
	}
	return blocks
}
