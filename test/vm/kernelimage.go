package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// decompressors maps the magic number of each format that Debian uses for kernels to its tool.
var decompressors = map[string]string{
	"\xfd7zXZ\x00":     "xz",
	"\x28\xb5\x2f\xfd": "zstd",
}

// extractKernel writes the kernel in the boot file to elfFile, uncompressed: decompressing it in the
// guest takes half of a boot.
func extractKernel(ctx context.Context, bootFile, elfFile string) error {
	boot, err := os.ReadFile(bootFile)
	if err != nil {
		return err
	}
	payload, err := kernelPayload(boot)
	if err != nil {
		return fmt.Errorf("%s: %w", bootFile, err)
	}
	for magic, tool := range decompressors {
		if !bytes.HasPrefix(payload, []byte(magic)) {
			continue
		}
		kernel, err := os.Create(elfFile)
		if err != nil {
			return err
		}
		var stderr bytes.Buffer
		cmd := exec.CommandContext(ctx, tool, "-d", "-c", "-q")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(payload), kernel, &stderr
		if err := errors.Join(cmd.Run(), kernel.Close()); err != nil {
			return fmt.Errorf("decompress %s by %s: %w: %s", bootFile, tool, err, &stderr)
		}
		return nil
	}
	return fmt.Errorf("%s: unknown compression format with magic number % x", bootFile, payload[:min(6, len(payload))])
}

// kernelPayload returns the compressed kernel in a boot file: see Documentation/arch/x86/boot.rst of
// the kernel.
func kernelPayload(boot []byte) ([]byte, error) {
	const (
		setupSectors  = 0x1f1
		signature     = 0x202
		payloadOffset = 0x248
		payloadLength = 0x24c
		headerEnd     = 0x250
		sector        = 512
		sizeField     = 4 // follows the compressed data and counts in the length
	)
	if len(boot) < headerEnd || string(boot[signature:signature+4]) != "HdrS" {
		return nil, errors.New("not a Linux boot file")
	}
	start := (int(boot[setupSectors])+1)*sector + int(binary.LittleEndian.Uint32(boot[payloadOffset:]))
	end := start + int(binary.LittleEndian.Uint32(boot[payloadLength:])) - sizeField
	if start > end || end > len(boot) {
		return nil, errors.New("truncated boot file")
	}
	return boot[start:end], nil
}
