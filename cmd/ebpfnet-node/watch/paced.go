package watch

import (
	"net"
	"time"
)

// pace is the pause before a drained connection is read again.
const pace = 40 * time.Millisecond

// paced is a connection of which events that follow each other closely are read together: to wake the process costs more than
// an event. An event after a pause is read at once.
type paced struct {
	net.Conn
	next time.Time // when to read again
}

func (p *paced) Read(to []byte) (int, error) {
	time.Sleep(time.Until(p.next))
	n, err := p.Conn.Read(to)
	if p.next = (time.Time{}); n < len(to) { // there is no more
		p.next = time.Now().Add(pace)
	}
	return n, err
}
