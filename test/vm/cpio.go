package main

import (
	"fmt"
	"io"
)

// cpioWriter writes an archive in cpio's newc format, the format of an initramfs.
type cpioWriter struct {
	w     io.Writer
	inode int
}

// File types of cpio, as in st_mode.
const (
	cpioDirectory = 0o040000
	cpioRegular   = 0o100000
)

func (c *cpioWriter) directory(name string, permissions int) error {
	return c.entry(name, cpioDirectory|permissions, nil)
}

func (c *cpioWriter) file(name string, permissions int, data []byte) error {
	return c.entry(name, cpioRegular|permissions, data)
}

// close writes the trailer of the archive.
func (c *cpioWriter) close() error {
	return c.entry("TRAILER!!!", 0, nil)
}

func (c *cpioWriter) entry(name string, mode int, data []byte) error {
	c.inode++
	header := "070701"
	for _, field := range []int{
		c.inode, mode,
		0, 0, // user, group
		1, // links
		0, // modification time
		len(data),
		0, 0, 0, 0, // device and special file: major, minor
		len(name) + 1,
		0, // checksum, unused in this format
	} {
		header += fmt.Sprintf("%08x", field)
	}
	if err := c.padded([]byte(header + name + "\x00")); err != nil {
		return fmt.Errorf("write cpio header of %s: %w", name, err)
	}
	if err := c.padded(data); err != nil {
		return fmt.Errorf("write cpio data of %s: %w", name, err)
	}
	return nil
}

// padded writes b and pads it to a multiple of four bytes.
func (c *cpioWriter) padded(b []byte) error {
	if _, err := c.w.Write(b); err != nil {
		return err
	}
	_, err := c.w.Write(make([]byte, -len(b)&3))
	return err
}
