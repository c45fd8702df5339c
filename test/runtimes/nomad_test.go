package runtimes

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	nomadDir    = "/run/nomad"
	nomadCalls  = "/run/calls" // of the plugin
	nomadConfig = `
data_dir = "` + nomadDir + `/data"
bind_addr = "127.0.0.1"
advertise {
  http = "127.0.0.1"
  rpc = "127.0.0.1"
  serf = "127.0.0.1"
}
disable_update_check = true
server {
  enabled = true
  bootstrap_expect = 1
}
client {
  enabled = true
  network_interface = "eth0"
  options = {"fingerprint.denylist" = "env_aws,env_azure,env_digitalocean,env_gce"}
}
plugin "raw_exec" {
  config {
    enabled = true
  }
}
`
)

// nomad is a server and a client of Nomad on one node.
type nomad struct{ *machine }

func newNomad(t *testing.T) nomad {
	t.Helper()
	n := nomad{newMachine(t, example(t, "example.conflist"))}
	n.install(t, testenv.Build(t, "github.com/hashicorp/nomad"), binDir+"/nomad")
	n.write(t, nomadDir+"/nomad.hcl", []byte(nomadConfig))
	n.write(t, "/opt/cni/config/10-ebpfnet.conflist", example(t, "example.conflist"))
	n.write(t, "/run/www/index.html", []byte("hello"))
	// Nomad believes the CHECK of all plugins if this one is new enough.
	n.write(t, pluginDir+"/bridge", []byte("#!/bin/sh\necho CNI bridge plugin v1.7.1\n"))
	n.env = append(n.env, "CNI_LOG_FILE="+nomadCalls)
	// Nomad takes files for cgroups, and leaves the host's alone.
	n.run(t, "sh", "-c", `mount -t tmpfs tmpfs /sys/fs/cgroup && cd /sys/fs/cgroup && mkdir cpu cpuset freezer memory &&
		echo 0 >cpuset/cpuset.mems && echo 0 >cpuset/cpuset.cpus`)
	n.start(t)
	return n
}

// start starts the agent and waits until its node takes jobs.
func (n nomad) start(t *testing.T) {
	t.Helper()
	n.startDaemon(t, "sh", "-c", "echo $$ >"+daemonPID+"; exec nomad agent -config "+nomadDir+"/nomad.hcl")
	testenv.Eventually(t, "Nomad's node", func() error {
		output, err := n.command(testenv.Context(t), "nomad", "node", "status").CombinedOutput()
		if err != nil || !strings.Contains(string(output), " ready") {
			err = fmt.Errorf("node status: got %s, %w; want ready", output, err)
		}
		return err
	})
}

// publish runs a job with one task, whose port 80 is port 8080 of the node.
func (n nomad) publish(t *testing.T, name string, command ...string) (id string) {
	t.Helper()
	n.write(t, nomadDir+"/"+name+".hcl", fmt.Appendf(nil, `
job "%[1]s" {
  group "%[1]s" {
    reschedule {
      delay = "5s"
      delay_function = "constant"
      unlimited = true
    }
    network {
      mode = "cni/pods"
      port "server" {
        static = 8080
        to = 80
      }
    }
    task "server" {
      driver = "raw_exec"
      config {
        command = "/bin/busybox"
        args = %[2]s
      }
    }
  }
}
`, name, encode(t, command)))
	n.run(t, "nomad", "job", "run", nomadDir+"/"+name+".hcl")
	return name
}

func (n nomad) remove(t *testing.T, id string) {
	t.Helper()
	n.run(t, "nomad", "job", "stop", "-purge", id)
}

// waitForCall waits until the plugin's log has a line with this message.
func (n nomad) waitForCall(t *testing.T, message string) {
	t.Helper()
	testenv.Eventually(t, message, func() error {
		if calls := n.run(t, "cat", nomadCalls); !strings.Contains(calls, message) {
			return fmt.Errorf("got %s, want %s", calls, message)
		}
		return nil
	})
}

// TestNomad has a job with a published port, whose connections go on while the agent is killed and starts again: its
// CHECK finds no fault. After the next start it finds one, and the job gets a new network, which answers at the port. The
// next job takes the port over.
func TestNomad(t *testing.T) {
	n := newNomad(t)
	before := n.state(t)
	n.publish(t, "echo", echoServer...)
	open := n.connections(t, "127.0.0.1")
	n.kill(t)
	open.want(t, "without the agent")
	n.start(t)
	n.waitForCall(t, "msg=CHECK ")
	open.want(t, "after the restart of the agent")

	n.kill(t)
	n.run(t, "sh", "-c", "nsenter --net=$(echo /run/netns/*) ip route del default")
	n.start(t)
	n.waitForCall(t, `msg="CHECK failed"`)
	n.waitForCall(t, "msg=DEL ")
	n.connections(t, "127.0.0.1")
	n.remove(t, "echo")
	n.waitForState(t, before)

	web := []string{"httpd", "-f", "-p", "80", "-h", "/run/www"}
	n.publish(t, "web", web...)
	n.wantPublished(t)
	n.remove(t, "web")
	n.waitForState(t, before)
}
