package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"
)

// The virtio serial port between runner and guest carries frames: a kind, the length of the payload
// (big endian, 32 bits), and the payload. The guest sends ready, then any number of stdout and stderr,
// then exit. The runner sends signal. If the port closes before exit, the guest died.
type frameKind byte

const (
	frameReady  frameKind = 'r' // the program is about to start; no payload
	frameStdout frameKind = 'o' // output of the program
	frameStderr frameKind = 'e'
	frameExit   frameKind = 'x' // the exit status: one byte
	frameSignal frameKind = 's' // the number of a signal for the program: one byte
)

const (
	portName     = "ebpfnet.vm"
	frameHeader  = 5
	maxFrameSize = 32 << 10
)

// frameWriter writes whole frames. It is safe for concurrent use.
type frameWriter struct {
	mu sync.Mutex
	w  io.Writer
}

// send writes one frame. The payload may have up to maxFrameSize bytes.
func (f *frameWriter) send(kind frameKind, payload []byte) error {
	frame := make([]byte, 0, frameHeader+len(payload))
	frame = append(frame, byte(kind))
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(payload)))
	frame = append(frame, payload...)

	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.w.Write(frame); err != nil {
		return fmt.Errorf("send frame %q: %w", kind, err)
	}
	return nil
}

// copyFrom sends the content of r as frames of the given kind, until EOF.
func (f *frameWriter) copyFrom(r io.Reader, kind frameKind) error {
	buf := make([]byte, maxFrameSize)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := f.send(kind, buf[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// readFrame returns io.EOF if r ends between two frames.
func readFrame(r io.Reader) (frameKind, []byte, error) {
	var header [frameHeader]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	size := binary.BigEndian.Uint32(header[1:])
	if size > maxFrameSize {
		return 0, nil, fmt.Errorf("frame %q of %d bytes: the limit is %d", header[0], size, maxFrameSize)
	}
	payload := make([]byte, size)
	if _, err := io.ReadFull(r, payload); err != nil {
		return 0, nil, fmt.Errorf("read frame %q: %w", header[0], err)
	}
	return frameKind(header[0]), payload, nil
}
