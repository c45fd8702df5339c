package ipam

import (
	"errors"
	"testing"
)

func TestDecodeRecord(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	both := Attachment{id, "eth0"}
	tests := []struct {
		name    string
		content string
		want    Attachment // the zero Attachment if torn
	}{
		{"host-local's", id + "\r\neth0", both},
		{"old host-local's, id alone", id, Attachment{ContainerID: id}},
		{"edited: trailing newline", id + "\r\neth0\n", both},
		{"edited: newline only", id + "\neth0\n", both},
		{"edited: surrounding space", " " + id + "\r\neth0  \r\n", both},
		{"id with line break", id + "\r\n", Attachment{ContainerID: id}},
		{"unusual names", "Pod_1.a-b\r\nnet.100@x", Attachment{"Pod_1.a-b", "net.100@x"}},

		{"empty", "", Attachment{}},
		{"space only", " \r\n", Attachment{}},
		{"zeroes", "\x00\x00\x00\x00", Attachment{}},
		{"zeroes at the end", id + "\r\net\x00\x00", Attachment{}},
		{"three lines", id + "\r\neth0\r\neth1", Attachment{}},
		{"words", "reserved for the printer", Attachment{}},
		{"control characters", "\x7fELF", Attachment{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := decodeRecord([]byte(tt.content))
			if torn := tt.want == (Attachment{}); torn != errors.Is(err, errTorn) {
				t.Fatalf("got %v, %v; want torn = %v", got, err, torn)
			}
			if got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestReserveRefusesUnrecordableAttachment(t *testing.T) {
	pool, _ := newPool(t, `[[{"subnet": "10.1.0.0/24"}]]`)
	for _, a := range []Attachment{{}, {"c1", ""}, {"", "eth0"}, {"c1\r\nc2", "eth0"}, {"c1", "eth 0"}, {"c1", "eth\x000"}} {
		if _, err := pool.Reserve(t.Context(), a); err == nil {
			t.Errorf("%q: reserved", a)
		}
	}
}
