package rtnl

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Message is a change: its type, such as unix.RTM_DELROUTE, and the data after the header.
type Message struct {
	Type uint16
	Data []byte
}

// Watch calls changed for each relevant change of devices, addresses and routes until ctx is done, and also after it
// has missed changes. The network namespace is the calling thread's.
func Watch(ctx context.Context, relevant func(Message) bool, changed func()) error {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK,
		unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return fmt.Errorf("watch devices, addresses and routes: %w", err)
	}
	defer context.AfterFunc(ctx, socket.Close)() // wakes the reader
	for {
		messages, from, err := socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS): // more changes than the socket has room for
			changed()
			continue
		case err != nil:
			socket.Close()
			return fmt.Errorf("watch devices, addresses and routes: %w", err)
		case from.Pid != nl.PidKernel:
			continue
		}
		for _, message := range messages {
			if relevant(Message{message.Header.Type, message.Data}) {
				changed()
				break
			}
		}
	}
}
