package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// story is the demo from beginning to end.
var story = []struct {
	name  string
	title string
	why   string // what happens, and why it matters
	width int    // of the names of what is done
	tell  func(*scene) error
}{
	{"machines", "The machines",
		"A node, a host outside of it, and three containers (\"pods\") without any network yet: each is a\n" +
			"network namespace. The outside host knows no route to pods, as the internet does not.",
		16, (*scene).makeMachines},
	{"add", "ADD: connect the pods",
		"What a container runtime does for each container, through libcni: run the plugin, read its result.\n" +
			"Each ADD is one short process, and nothing keeps running. The first one loads the datapath.",
		11, (*scene).addPods},
	{"pods", "From pod to pod",
		"Every pod reaches every other by its own address, and is seen under its own address.",
		41, (*scene).betweenPods},
	{"masquerade", "From a pod to the outside",
		"\"ipMasq\": on the uplink, a BPF program puts the node's address in the place of the pod's, which\n" +
			"nobody outside could answer. Every reply finds its way back by one entry in a map.",
		41, (*scene).toOutside},
	{"hostport", "By a port of the node to a pod",
		fmt.Sprintf("\"portMappings\": port %d of the node leads to port %d of the last pod. It sees who asks from outside;\n"+
			"the node, other pods and itself ask as the gateway. No route_localnet: 127.0.0.1 and ::1 just work.", hostPort, podPort),
		41, (*scene).fromOutside},
	{"maps", "What the datapath knows",
		"All state is in pinned BPF maps, so that any tool can read it; here it is in words.",
		10, (*scene).tellMaps},
	{"nothing-else", "What is not there",
		"No bridge, no rules, no daemon: nothing that a firewall's reload could break, or that could stop.",
		17, (*scene).tellAbsent},
	{"check", "CHECK: is everything as it was left?",
		"The runtime can ask at any time; the plugin compares devices, addresses, routes, programs and maps.",
		12, (*scene).checkPods},
	{"del", "DEL: disconnect the pods",
		"The reverse of ADD, and then the proof that nothing of the pods is left anywhere.",
		41, (*scene).deletePods},
}

// run tells the story, up to the first failure.
func run(m *testenv.Machine, r *report, opts options) error {
	s := &scene{Machine: m, report: r}
	dir, err := s.prepare(opts)
	if err != nil {
		return err
	}
	r.printf("%s\n", r.paint(bold, "ebpfnet: containers' network by eBPF alone, as a CNI plugin"))
	r.printf("  plugin %s/%s, network of %s, Linux %s\n", dir, pluginName, s.conflist.path, r.summary.Kernel)

	keys := bufio.NewReader(os.Stdin)
	for i, chapter := range story {
		r.begin(&step{Name: chapter.name, Title: chapter.title, width: chapter.width}, chapter.why)
		start := time.Now()
		err := m.Protect(func() error { return chapter.tell(s) })
		r.end(time.Since(start), err)
		if err != nil {
			return fmt.Errorf("step %d (%s): %w", i+1, chapter.name, err)
		}
		if opts.pause {
			s.pause(keys)
		}
	}
	return nil
}

// prepare finds the plugin and its configuration.
func (s *scene) prepare(opts options) (dir string, err error) {
	path, err := conflistPath(opts)
	if err != nil {
		return "", err
	}
	if s.conflist, err = readConflist(path); err != nil {
		return "", err
	}
	s.report.summary.Conflist = path
	return pluginDir()
}

// pause waits for Enter, and tells how to look around meanwhile.
func (s *scene) pause(keys *bufio.Reader) {
	if s.topology != nil {
		inside := fmt.Sprintf("nsenter -t $(pgrep -P %s) -m -p", os.Getenv(outerEnv))
		s.report.note(fmt.Sprintf("Look around as root in another terminal: %s nsenter --net=%s bash",
			inside, s.topology.Node.Path))
	}
	s.report.printf("   Enter for the next step: ")
	if _, err := keys.ReadString('\n'); err != nil {
		s.report.printf("\n") // no terminal, or its end: go on
	}
}

func (s *scene) makeMachines() error {
	s.topology = testenv.NewTopology(s)
	dir, err := pluginDir()
	if err != nil {
		return err
	}
	s.runtime = testenv.NewRuntime(s, s.topology.Node, s.conflist.raw, dir)
	if err := s.serve(s.topology.Outside, "outside"); err != nil {
		return err
	}
	if err := s.newPods(); err != nil {
		return err
	}
	if s.linksBefore, err = links(s.topology.Node); err != nil {
		return err
	}
	r := s.report
	r.ok("outside", "%s and %s, a web server on port %d", testenv.OutsideAddr4, testenv.OutsideAddr6, podPort)
	r.ok("node", "%s and %s on %s, default route by outside", testenv.NodeAddr4, testenv.NodeAddr6, strings.Join(s.linksBefore, ", "))
	for _, p := range s.pods {
		devices, err := links(p.Namespace)
		if err != nil {
			return err
		}
		if len(devices) > 0 {
			return &mismatch{p.title, "no device but lo", fmt.Sprint(devices)}
		}
	}
	r.ok("pods a, b and c", "no device but lo, a web server on port %d of each", podPort)
	return nil
}
