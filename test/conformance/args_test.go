package conformance

import (
	"fmt"
	"testing"
)

// TestArgs requests addresses and a MAC address by every means. Which of them wins is tested in plugin/config.
func TestArgs(t *testing.T) {
	h := newHost(t)
	kubernetes := "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_UID=2f0e"
	for _, test := range []struct {
		name, args string
		conf       object
		want       string // addresses, MAC
	}{
		{"Kubernetes", kubernetes, single("1.0.0"), ""},
		{"IP and MAC", "IP=10.88.1.1;MAC=02:00:00:00:00:01", single("1.0.0"), "[10.88.1.1] 02:00:00:00:00:01"},
		{"two IPs", "IP=10.88.1.1,fd00:88::11", dual("1.0.0"), "[10.88.1.1 fd00:88::11] "},
		{"args.cni", "", with(with(single("1.0.0"), "args.cni.ips", list{"10.88.1.2"}), "args.cni.mac", "02:00:00:00:00:02"), "[10.88.1.2] 02:00:00:00:00:02"},
		{"runtimeConfig", "", with(with(dual("1.0.0"), "runtimeConfig.ips", list{"fd00:88::13", "10.88.1.3/16"}), "runtimeConfig.mac", "02:00:00:00:00:03"), "[10.88.1.3 fd00:88::13] 02:00:00:00:00:03"},
		{"informative capabilities", "", with(single("1.0.0"), "runtimeConfig",
			object{"aliases": list{"web"}, "cgroupPath": "/a", "io.kubernetes.cri.pod-annotations": object{"a": "b"}}), ""},
		{"runtime's ranges", "", with(single("1.0.0"), "runtimeConfig.ipRanges", list{list{object{"subnet": "10.87.0.0/16", "rangeStart": "10.87.0.5"}}}), "[10.87.0.5 10.88.0.2] "},
	} {
		t.Run(test.name, func(t *testing.T) {
			removeReservations(t)
			p := h.pod(t, "c1", test.conf)
			before := h.snapshot(t, p.Namespace)
			p.args = test.args
			result := p.add(t)
			var addrs any = addresses(result)
			if test.want == "" || test.want[:2] == "[]" {
				addrs = "[]"
			}
			mac := ""
			if test.want != "" && test.want[len(test.want)-1] != ' ' {
				mac = p.device(t).Attrs().HardwareAddr.String()
			}
			if got := fmt.Sprint(addrs, " ", mac); test.want != "" && got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
			wantSuccess(t, p.try(t, "CHECK"), "")
			p.del(t)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}
