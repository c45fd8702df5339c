package watch

import (
	"bytes"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// received is a connection that has received some bytes.
type received struct {
	net.Conn
	bytes bytes.Buffer
}

func (r *received) Read(to []byte) (int, error) { return r.bytes.Read(to) }

// TestPaced reads all that there is at once, and what follows after a while.
func TestPaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := &received{}
		p := &paced{Conn: from}
		read := func(want string, waits time.Duration) {
			t.Helper()
			start, to := time.Now(), make([]byte, 2)
			if n, err := p.Read(to); string(to[:n]) != want || err != nil || time.Since(start) != waits {
				t.Errorf("got %q, %v after %v, want %q after %v", to[:n], err, time.Since(start), want, waits)
			}
		}
		from.bytes.WriteString("abc")
		read("ab", 0)
		read("c", 0)
		from.bytes.WriteString("de")
		read("de", pace)
		from.bytes.WriteString("f")
		read("f", 0)
		time.Sleep(2 * pace)
		from.bytes.WriteString("g")
		read("g", 0)
	})
}
