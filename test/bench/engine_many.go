package main

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// clients is the number of clients at once. Each waits for its reply before it goes on, so there are
// as many outstanding requests.
const clients = 64

// last marks the last request of all connections.
const last = 'l'

// manyRoundTrips has all clients send one byte back and forth, each on a connection of its own.
func manyRoundTrips(e ends, slice time.Duration) (got sample, err error) {
	return many(e, slice, serveConnections, (*crowd).nextRequest)
}

// manyConnections has all clients make a connection for each byte.
func manyConnections(e ends, slice time.Duration) (got sample, err error) {
	return many(e, slice, serveRequests, (*crowd).nextConnection)
}

func many(e ends, slice time.Duration, serve func(listener int) error, next func(c *crowd, fd int) error) (got sample, err error) {
	return got, clientAndServer(e, unix.SOCK_STREAM, serve, func() error {
		c, err := newCrowd(addressOf(e.dial))
		if err != nil {
			return err
		}
		defer c.poller.close()
		got, err = c.run(newMeter(slice, slice/8), next) // a batch of replies takes most of a shorter part
		return errors.Join(err, c.leave())
	})
}

// crowd is all clients.
type crowd struct {
	poller *poller
	to     *address
	began  map[int]time.Time // by open socket: the start of its request
	data   []byte
}

func newCrowd(to *address) (*crowd, error) {
	p, err := newPoller()
	return &crowd{poller: p, to: to, began: make(map[int]time.Time), data: make([]byte, 1)}, err
}

// run has all clients make requests until the slice is over.
func (c *crowd) run(m *meter, next func(c *crowd, fd int) error) (sample, error) {
	for range clients {
		if err := c.open(); err != nil {
			return sample{}, err
		}
	}
	for now := time.Now(); !m.over(now); {
		ready, err := c.poller.wait()
		if err != nil {
			return sample{}, err
		}
		for _, event := range ready {
			fd := int(event.Fd)
			if err := c.receive(fd); err != nil {
				return sample{}, err
			}
			now = time.Now()
			m.done(c.began[fd], now)
			if err := next(c, fd); err != nil {
				return sample{}, err
			}
		}
	}
	return m.sample()
}

// open connects and sends a request.
func (c *crowd) open() error {
	began := time.Now()
	fd, err := connectSocket(unix.SOCK_STREAM, c.to)
	if err != nil {
		return err
	}
	c.began[fd] = began
	return errors.Join(noDelay(fd), c.poller.add(fd), c.send(fd))
}

func (c *crowd) send(fd int) error {
	_, err := write(fd, c.data)
	return err
}

func (c *crowd) receive(fd int) error {
	n, err := read(fd, c.data)
	if err == nil && n == 0 {
		err = errors.New("closed without a reply")
	}
	return err
}

func (c *crowd) nextRequest(fd int) error {
	c.began[fd] = time.Now()
	return c.send(fd)
}

func (c *crowd) nextConnection(fd int) error {
	c.close(fd)
	return c.open()
}

func (c *crowd) close(fd int) {
	closeSocket(fd)
	delete(c.began, fd)
}

// leave receives the outstanding replies, closes all connections and lets the server end.
func (c *crowd) leave() error {
	var errs []error
	for fd := range c.began {
		errs = append(errs, c.receive(fd))
		c.close(fd)
	}
	c.data[0] = last
	fd, err := connectSocket(unix.SOCK_STREAM, c.to)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	defer closeSocket(fd)
	return errors.Join(append(errs, request(fd, c.data))...)
}

// serveConnections replies on each connection until its client closes it.
func serveConnections(listener int) error {
	return serveMany(listener, func(fd int, data []byte) (ended bool, err error) {
		n, err := read(fd, data)
		if n > 0 && err == nil {
			_, err = write(fd, data)
		}
		return n == 0, err
	})
}

// serveRequests replies to one request of each connection and closes it.
func serveRequests(listener int) error {
	return serveMany(listener, func(fd int, data []byte) (ended bool, err error) {
		if _, err = read(fd, data); err == nil {
			_, err = write(fd, data)
		}
		return true, err
	})
}

// serveMany accepts connections and serves those with data until the last request of all.
func serveMany(listener int, serve func(fd int, data []byte) (ended bool, err error)) error {
	p, err := newPoller()
	if err != nil {
		return err
	}
	defer p.close()
	if err := p.add(listener); err != nil {
		return err
	}
	open := make(map[int]bool, clients+1)
	defer func() {
		for fd := range open {
			closeSocket(fd)
		}
	}()
	data := make([]byte, 1)
	for data[0] != last {
		ready, err := p.wait()
		if err != nil {
			return err
		}
		for _, event := range ready {
			fd := int(event.Fd)
			if fd == listener {
				if fd, err = acceptSocket(listener); err != nil {
					return err
				}
				open[fd] = true
				err = p.add(fd)
			} else if ended, failed := serve(fd, data); ended || failed != nil {
				closeSocket(fd)
				delete(open, fd)
				err = failed
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}
