package main

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/metrics"
)

type metricsOptions struct {
	metrics.Options
	textfile string
	listen   string
}

func newMetrics() *cobra.Command {
	var o metricsOptions
	cmd := &cobra.Command{
		Use:   "metrics",
		Short: "figures for Prometheus",
		Long: `Prints the figures of this host for Prometheus, in the format of OpenMetrics;
with --textfile it writes them for node_exporter, with --listen it serves them
until it is ended. Those of each container and of flows cost time for each, so
there are flags for them.

--listen wants the address as well as the port. The figures tell who is
connected, and nothing asks for a password: 127.0.0.1 is for this host alone.`,
		Example: `  ebpfnetctl metrics
  ebpfnetctl metrics --textfile /var/lib/node_exporter/ebpfnet.prom
  ebpfnetctl metrics --listen 127.0.0.1:9909 --containers`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error { return exportMetrics(cmd, o) },
	}
	addDataDir(cmd, &o.DataDir)
	cmd.Flags().StringVar(&o.Runtimes.ConfDir, "conf-dir", "", "`DIR` has the network configurations, with the sizes of ranges, if not where the runtime looks")
	cmd.Flags().StringVar(&o.textfile, "textfile", "", "replace `FILE`, whose name ends in .prom")
	cmd.Flags().StringVar(&o.listen, "listen", "", "serve http://`ADDRESS:PORT`/metrics")
	cmd.Flags().BoolVar(&o.Containers, "containers", false, "also the traffic and the drops of each container")
	cmd.Flags().BoolVar(&o.Flows, "flows", false, "also the number of flows, by their states")
	return cmd
}

func (o metricsOptions) check() error {
	if o.textfile != "" && o.listen != "" {
		return usageError{errors.New("metrics: --textfile and --listen: expected one of them")}
	}
	if o.textfile != "" && filepath.Ext(o.textfile) != ".prom" {
		return usageError{fmt.Errorf("metrics: --textfile %s: expected a name that ends in .prom, because node_exporter reads no other", o.textfile)}
	}
	if o.listen == "" {
		return nil
	}
	if host, port, err := net.SplitHostPort(o.listen); err != nil || host == "" || port == "" {
		return usageError{fmt.Errorf("metrics: --listen %s: expected ADDRESS:PORT, such as 127.0.0.1:9909 or [::1]:9909", o.listen)}
	}
	return nil
}

func exportMetrics(cmd *cobra.Command, o metricsOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	all := metrics.New(o.Options)
	switch {
	case o.textfile != "":
		return prometheus.WriteToTextfile(o.textfile, all)
	case o.listen == "":
		return metrics.Write(cmd.OutOrStdout(), all)
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return err
	}
	output.Printf(cmd.ErrOrStderr(), "serving http://%s/metrics\n", listener.Addr().String())
	return metrics.Serve(cmd.Context(), listener, all)
}
