// Package screen shows a picture on a terminal that is drawn anew until somebody has seen enough, and
// then leaves the terminal as it was.
//
// It imports nothing of this module.
package screen

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

// Sequences of terminals: the alternate screen, without a cursor, where long lines do not wrap.
const (
	enter     = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
	leave     = "\x1b[?7h\x1b[?25h\x1b[?1049l"
	home      = "\x1b[H"
	clearLine = "\x1b[K"
	clearRest = "\x1b[J"
)

// Draw prints the picture, which has room for so many columns and lines.
type Draw func(to io.Writer, columns, lines int) error

// Run draws every interval, and when the terminal changes its size, until ctx is done, or somebody presses
// q or Ctrl-C. out is a terminal; in is where keys come from, if it is one, too.
func Run(ctx context.Context, in, out *os.File, interval time.Duration, draw Draw) (err error) {
	keys, restore, err := readKeys(in)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(out, enter); err != nil {
		return errors.Join(err, restore())
	}
	defer func() {
		_, failed := io.WriteString(out, leave)
		err = errors.Join(err, failed, restore())
	}()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if err := show(out, draw); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case key := <-keys:
			if key == 'q' || key == 'Q' {
				return nil
			}
		case <-resized:
		case <-ticker.C:
		}
	}
}

// readKeys sends each key that is pressed. Ctrl-Z and Ctrl-\ are keys like others meanwhile: they would
// leave the terminal as it is.
func readKeys(in *os.File) (<-chan byte, func() error, error) {
	fd := int(in.Fd())
	before, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return nil, func() error { return nil }, nil // no terminal, so no keys
	}
	now := *before
	now.Lflag &^= unix.ICANON | unix.ECHO
	now.Cc[unix.VMIN], now.Cc[unix.VTIME] = 1, 0
	now.Cc[unix.VSUSP], now.Cc[unix.VQUIT] = 0, 0
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &now); err != nil {
		return nil, nil, fmt.Errorf("set up the terminal: %w", err)
	}
	keys := make(chan byte)
	go func() { // it ends with the process
		key := make([]byte, 1)
		for {
			if n, err := in.Read(key); n == 0 || err != nil {
				return
			}
			keys <- key[0]
		}
	}()
	return keys, func() error { return unix.IoctlSetTermios(fd, unix.TCSETS, before) }, nil
}

// show shows one picture, without a moment in which the screen is empty.
func show(out *os.File, draw Draw) error {
	columns, lines := size(out)
	var picture bytes.Buffer
	if err := draw(&picture, columns, lines); err != nil {
		return err
	}
	frame := []byte(home)
	for i, line := range bytes.Split(bytes.TrimRight(picture.Bytes(), "\n"), []byte("\n")) {
		if i == lines {
			break
		}
		if i > 0 {
			frame = append(frame, "\r\n"...)
		}
		frame = append(append(frame, line...), clearLine...)
	}
	_, err := out.Write(append(frame, clearRest...))
	return err
}

func size(out *os.File) (columns, lines int) {
	size, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 || size.Row == 0 {
		return 80, 24
	}
	return int(size.Col), int(size.Row)
}
