package metrics

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
)

// Write writes all metrics in the format of OpenMetrics, or nothing.
func Write(to io.Writer, from prometheus.Gatherer) error {
	return write(to, from, expfmt.NewFormat(expfmt.TypeOpenMetrics))
}

func write(to io.Writer, from prometheus.Gatherer, format expfmt.Format) error {
	families, err := from.Gather()
	if err != nil {
		return err
	}
	var text bytes.Buffer
	encoder := expfmt.NewEncoder(&text, format)
	for _, family := range families {
		if err := encoder.Encode(family); err != nil {
			return err
		}
	}
	if closer, ok := encoder.(expfmt.Closer); ok { // OpenMetrics ends with a line of its own
		if err := closer.Close(); err != nil {
			return err
		}
	}
	_, err = to.Write(text.Bytes())
	return err
}

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
	mux.Handle("GET /metrics", Handler(from, promhttp.HandlerOpts{}))
	return ServeHTTP(ctx, listener, mux)
}

// Handler answers scrapes. The options say what becomes of errors: by default a scrape fails.
func Handler(from prometheus.Gatherer, o promhttp.HandlerOpts) http.Handler {
	o.EnableOpenMetrics, o.MaxRequestsInFlight = true, atOnce
	return promhttp.HandlerFor(from, o)
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
