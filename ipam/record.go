package ipam

import (
	"errors"
	"fmt"
	"strings"
)

// Attachment names who holds an address. IfName is "" in records of old host-local
// versions, which wrote the container id alone; such a record may belong to any
// interface of the container.
type Attachment struct {
	ContainerID, IfName string
}

func (a Attachment) String() string {
	if a.IfName == "" {
		return "container " + a.ContainerID
	}
	return fmt.Sprintf("container %s interface %s", a.ContainerID, a.IfName)
}

// old returns the attachment that an old record of a's container names.
func (a Attachment) old() Attachment { return Attachment{ContainerID: a.ContainerID} }

// errTorn says that a file holds no record: a crash cut its writing short.
var errTorn = errors.New("torn record")

const lineBreak = "\r\n"

func encodeRecord(a Attachment) []byte {
	if a.IfName == "" {
		return []byte(a.ContainerID)
	}
	return []byte(a.ContainerID + lineBreak + a.IfName)
}

// decodeRecord returns errTorn for what neither we nor any host-local can have written.
// It is lenient otherwise: to take a record for torn gives its address to a second container.
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

// checkAttachment refuses what would not read back as the same record.
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
	for _, c := range []byte(text) {
		if c <= space || c == del {
			return false
		}
	}
	return text != ""
}
