package testenv

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
)

// ServeHTTP starts an HTTP server in the namespace that replies to every request with the
// client's address and port as it sees them.
func ServeHTTP(tb TB, ns *Namespace, addr netip.AddrPort) *Server {
	tb.Helper()
	listener, err := ns.Listen(Context(tb), addr)
	if err != nil {
		tb.Fatalf("start HTTP server in %s: %v", ns.Name, err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.RemoteAddr)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.Serve(listener)
	}()
	s := &Server{Addr: addrPort(listener.Addr()), name: ns.Name, close: func() {
		server.Close()
		<-done
	}}
	tb.Cleanup(s.Close)
	return s
}

// HTTPGet requests url from inside the namespace, over its own connection, and returns the body.
// The host in url must be an address, because the namespace has no name resolution.
func HTTPGet(ctx context.Context, ns *Namespace, url string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			remote, err := netip.ParseAddrPort(addr)
			if err != nil {
				return nil, err
			}
			return ns.Dial(ctx, network, remote)
		},
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return "", fmt.Errorf("read reply of %s: %w", url, err)
	}
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("get %s: %s: %s", url, response.Status, body)
	}
	return string(body), nil
}
