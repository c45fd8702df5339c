package nodes

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protowire"
)

// envelope begins what the API sends in protobuf: a runtime.Unknown, whose field unknownRaw is the object.
const (
	envelope   = "k8s\x00"
	unknownRaw = 2
)

// readList reads a NodeList as it comes, one node at a time: that of 5,000 nodes has 60 MB, of which client-go would
// keep all, several times.
func readList(body io.Reader) (*objectList, error) {
	list, in := &objectList{}, bufio.NewReader(body)
	begin := make([]byte, len(envelope))
	if _, err := io.ReadFull(in, begin); err != nil {
		return nil, fmt.Errorf("read a list of nodes: %w", err)
	}
	if string(begin) != envelope {
		return nil, fmt.Errorf("read a list of nodes: it begins with %q, want protobuf of the API, which begins with %q", begin, envelope)
	}
	err := eachField(in, func(id protowire.Number, field *io.LimitedReader) error {
		if id != unknownRaw {
			return nil
		}
		return eachField(bufio.NewReader(field), list.readField)
	})
	if err == nil && list.ResourceVersion == "" {
		err = errors.New("got no version of it")
	}
	if err != nil {
		return nil, fmt.Errorf("read a list of nodes: %w", err)
	}
	return list, nil
}

// eachField calls read with each field of a message that is a message or a string. What read leaves, and numbers, are
// skipped.
func eachField(in *bufio.Reader, read func(protowire.Number, *io.LimitedReader) error) error {
	for {
		tag, err := binary.ReadUvarint(in)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		id, kind := protowire.DecodeTag(tag)
		switch kind {
		case protowire.BytesType:
			err = readBytes(in, func(field *io.LimitedReader) error { return read(id, field) })
		case protowire.VarintType:
			_, err = binary.ReadUvarint(in)
		case protowire.Fixed32Type:
			_, err = in.Discard(4)
		case protowire.Fixed64Type:
			_, err = in.Discard(8)
		default:
			err = fmt.Errorf("got type %d, want one of protobuf 3", kind)
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("field %d: %w", id, err)
		}
	}
}

// readBytes calls read with a field, and skips what read leaves.
func readBytes(in *bufio.Reader, read func(*io.LimitedReader) error) error {
	size, err := binary.ReadUvarint(in)
	if err != nil {
		return err
	}
	field := &io.LimitedReader{R: in, N: int64(size)}
	if err := read(field); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, field); err != nil {
		return err
	}
	if field.N != 0 {
		return io.ErrUnexpectedEOF
	}
	return nil
}

func (l *objectList) readField(id protowire.Number, field *io.LimitedReader) error {
	if id != listMeta && id != listItems {
		return nil
	}
	l.buffer.Reset()
	if _, err := l.buffer.ReadFrom(field); err != nil {
		return err
	}
	if field.N != 0 { // else what is there so far may look like a node
		return io.ErrUnexpectedEOF
	}
	if id == listMeta {
		return l.readMeta(l.buffer.Bytes())
	}
	var item object
	err := item.Unmarshal(l.buffer.Bytes())
	l.Items = append(l.Items, item)
	return err
}
