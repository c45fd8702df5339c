// Judges has two evaluators of NetworkPolicy, which others wrote, judge connections: it reads cases as package
// policies makes them, and answers each with the verdicts. Where they differ without a known reason, it fails.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/ebpfnet/ebpfnet/test/policies"
)

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "judges:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	asked, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var c policies.Case
		if err := asked.Decode(&c); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read a case: %w", err)
		}
		verdicts, err := agreed(c)
		if err != nil {
			return err
		}
		if err := answers.Encode(verdicts); err != nil {
			return err
		}
	}
}
