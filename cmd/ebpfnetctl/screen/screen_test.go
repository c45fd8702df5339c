package screen

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// openTerminal returns both ends of a pseudo terminal of 20 columns and 5 lines.
func openTerminal(t *testing.T) (user, terminal *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { user.Close() })
	if err := unix.IoctlSetPointerInt(int(user.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(user.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: 20, Row: 5}); err != nil {
		t.Fatal(err)
	}
	return user, terminal
}

// TestRun ends a picture by q and by the end of its context, and on an error. The terminal is as before.
func TestRun(t *testing.T) {
	broken := fmt.Errorf("broken")
	for name, test := range map[string]struct {
		end  func(user *os.File, cancel func())
		draw error
	}{
		"q":     {end: func(user *os.File, _ func()) { io.WriteString(user, "xq") }},
		"ends":  {end: func(_ *os.File, cancel func()) { cancel() }},
		"error": {end: func(*os.File, func()) {}, draw: broken},
	} {
		t.Run(name, func(t *testing.T) {
			user, terminal := openTerminal(t)
			before, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			drawn := make(chan bool)
			pictures := 0
			ended := make(chan error)
			go func() {
				ended <- Run(ctx, terminal, terminal, 10*time.Millisecond, func(to io.Writer, columns, lines int) error {
					if pictures++; pictures == 3 {
						close(drawn)
						return test.draw
					}
					_, err := io.WriteString(to, fmt.Sprintf("%dx%d\n%s", columns, lines, strings.Repeat("line\n", 9)))
					return err
				})
			}()
			<-drawn
			test.end(user, cancel)
			if err := <-ended; !errors.Is(err, test.draw) {
				t.Errorf("got %v, want %v", err, test.draw)
			}
			after, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
			if err != nil || *after != *before {
				t.Errorf("terminal: got %+v (%v), want it as before, %+v", after, err, before)
			}
			io.WriteString(terminal, "\x04end\n")
			shown := readUntil(t, user, "end")
			frame := home + "20x5" + clearLine + strings.Repeat("\r\r\nline"+clearLine, 4) + clearRest
			for _, want := range []string{enter, frame, leave} {
				if strings.Count(shown, want) == 0 {
					t.Errorf("got %q, want %q in it", shown, want)
				}
			}
			if strings.Index(shown, leave) < strings.LastIndex(shown, home) {
				t.Errorf("got %q, want no picture after the last sequence", shown)
			}
		})
	}
}

func readUntil(t *testing.T, from io.Reader, last string) string {
	t.Helper()
	var all bytes.Buffer
	part := make([]byte, 4096)
	for !strings.Contains(all.String(), last) {
		n, err := from.Read(part)
		if err != nil {
			t.Fatalf("got %q, then %v, want %q", all.String(), err, last)
		}
		all.Write(part[:n])
	}
	return all.String()
}
