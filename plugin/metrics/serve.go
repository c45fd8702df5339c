package metrics

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Limits for clients.
const (
	readTimeout  = 5 * time.Second
	writeTimeout = 30 * time.Second
	idleTimeout  = 2 * time.Minute // longer than intervals of scrapes: connections stay open
	headerBytes  = 16 << 10
	atOnce       = 4 // scrapes; more get 503
)

// Serve answers GET /metrics until ctx is done, and then finishes the scrapes under way.
func Serve(ctx context.Context, listener net.Listener, from prometheus.Gatherer) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", Handler(from))
	return ServeHTTP(ctx, listener, mux)
}

// Handler answers scrapes.
func Handler(from prometheus.Gatherer) http.Handler {
	return promhttp.HandlerFor(from, promhttp.HandlerOpts{
		EnableOpenMetrics:   true,
		MaxRequestsInFlight: atOnce,
	})
}

// ServeHTTP answers until ctx is done, and then finishes the requests under way.
func ServeHTTP(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: readTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    headerBytes,
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	within, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	err := server.Shutdown(within)
	if served := <-ended; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
