package ipam

import (
	"errors"
	"fmt"
	"strings"
)

// Attachment is the holder of an address. IfName is "" in records of old host-local
// versions, which wrote only the container id; such a record may belong to any interface
// of the container.
type Attachment struct {
	ContainerID, IfName string
}

func (a Attachment) String() string {
	if a.IfName == "" {
		return "container " + a.ContainerID
	}
	return fmt.Sprintf("container %s interface %s", a.ContainerID, a.IfName)
}

// old returns the attachment as old versions of host-local record it.
func (a Attachment) old() Attachment { return Attachment{ContainerID: a.ContainerID} }

// errTorn says that a file holds no complete record, because of a crash during the write.
var errTorn = errors.New("torn record")

const lineBreak = "\r\n"

func encodeRecord(a Attachment) []byte {
	if a.IfName == "" {
		return []byte(a.ContainerID)
	}
	return []byte(a.ContainerID + lineBreak + a.IfName)
}

// decodeRecord returns errTorn for content that neither ebpfnet nor any host-local writes
// completely. Otherwise it is lenient: a valid record that counts as torn would give its
// address to a second container.
func decodeRecord(content []byte) (Attachment, error) {
	lines := strings.Split(strings.Trim(string(content), " \t\r\n"), "\n")
	for i := range lines {
		lines[i] = strings.TrimSuffix(lines[i], "\r")
		if !isWord(lines[i]) {
			return Attachment{}, errTorn
		}
	}
	switch len(lines) {
	case 1:
		return Attachment{ContainerID: lines[0]}, nil
	case 2:
		return Attachment{ContainerID: lines[0], IfName: lines[1]}, nil
	default:
		return Attachment{}, errTorn
	}
}

// checkAttachment refuses names that would not read back as the same record.
func checkAttachment(a Attachment) error {
	if !isWord(a.ContainerID) {
		return fmt.Errorf("container id %q: expected one word", a.ContainerID)
	}
	if !isWord(a.IfName) {
		return fmt.Errorf("interface name %q: expected one word", a.IfName)
	}
	return nil
}

func isWord(text string) bool {
	const space, del = ' ', 0x7f
	return text != "" && !strings.ContainsFunc(text, func(c rune) bool { return c <= space || c == del })
}
