package chart

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const (
	pod       = "DaemonSet.spec.template.spec."
	container = pod + "containers.0."
)

// policyRights are the paths of the rights that only NetworkPolicy needs, without values.
func policyRights() (gone []string) {
	leaves := map[string]any{}
	for _, kind := range []string{"ClusterRole", "ClusterRoleBinding"} {
		flatten("policy "+kind, kustomize(&testing.T{}, manifests)["policy "+kind], leaves)
	}
	for path := range leaves {
		gone = append(gone, path+":")
	}
	return gone
}

// rows are values, and all that they change.
var rows = []struct {
	values string
	want   []string
}{
	{`image: {repository: registry.example:5000/ebpfnet-node}`, []string{container + "image: registry.example:5000/ebpfnet-node:0.1.0"}},
	{`image: {tag: v2}`, []string{container + "image: ebpfnet-node:v2"}},
	{`image: {tag: v2, digest: "sha256:` + strings.Repeat("0a", 32) + `"}`, []string{container + "image: ebpfnet-node@sha256:" + strings.Repeat("0a", 32)}},
	{`image: {pullPolicy: Always}`, []string{container + "imagePullPolicy: Always"}},
	{`imagePullSecrets: [{name: registry}]`, []string{pod + "imagePullSecrets.0.name: registry"}},
	{`options: {mode: auto}`, []string{
		container + "args.0: --network-policy", container + "args.1: --template=/etc/ebpfnet-node/template", container + "args.2: --bin-dir=/opt/cni/bin",
		container + "args.3: --mode=auto",
	}},
	{`options: {vni: 16777215, port: 8472, probe-port: 9000, mtu: 1400, device: vx0, prefer-ipv6: true, api-server: "https://192.0.2.1:6443"}`, []string{
		container + "args.4: --api-server=https://192.0.2.1:6443", container + "args.5: --device=vx0", container + "args.6: --mtu=1400",
		container + "args.7: --port=8472", container + "args.8: --prefer-ipv6=true", container + "args.9: --probe-port=9000", container + "args.10: --vni=16777215",
	}},
	{`options: {log-denied: 100}`, []string{container + "args.4: --log-denied=100"}},
	{`options: {policy-grace: 1h30m}`, []string{container + "args.4: --policy-grace=1h30m"}},
	{`networkPolicy: false`, slices.Concat([]string{
		container + "args.1: --template=/etc/ebpfnet-node/template", container + "args.2: --bin-dir=/opt/cni/bin", container + "args.3:",
	}, policyRights())},
	{`options: {cluster-cidr: [10.244.0.0/16, "fd00:10:244::/48"]}`, []string{container + "args.4: --cluster-cidr=10.244.0.0/16,fd00:10:244::/48"}},
	{`extraArgs: [--new=1, --newer]`, []string{container + "args.4: --new=1", container + "args.5: --newer"}},
	{`plugin: {ipMasq: false, maxFlows: 1048576, ipam: {type: host-local, dataDir: /run/addresses}}`, []string{`ConfigMap.data.template: {
  "cniVersion": "1.1.0",
  "name": "pods",
  "plugins": [
    {
      "capabilities": {
        "bandwidth": true,
        "portMappings": true
      },
      "ipMasq": false,
      "ipam": {
        "dataDir": "/run/addresses",
        "type": "host-local"
      },
      "maxFlows": 1048576,
      "type": "ebpfnet"
    }
  ]
}`}},
	{`chainedPlugins: [{type: sbr}]`, []string{`ConfigMap.data.template: {
  "cniVersion": "1.1.0",
  "name": "pods",
  "plugins": [
    {
      "capabilities": {
        "bandwidth": true,
        "portMappings": true
      },
      "ipMasq": true,
      "type": "ebpfnet"
    },
    {
      "type": "sbr"
    }
  ]
}`}},
	{`conflist: {cniVersion: 1.0.0, name: own, plugins: [{type: ebpfnet}]}`, []string{`ConfigMap.data.template: {
  "cniVersion": "1.0.0",
  "name": "own",
  "plugins": [
    {
      "type": "ebpfnet"
    }
  ]
}`}},
	{`paths: {conflist: /var/lib/rancher/k3s/agent/etc/cni/net.d, plugins: /var/lib/rancher/k3s/data/cni, addresses: /run/addresses}`, []string{
		pod + "volumes.1.hostPath.path: /var/lib/rancher/k3s/agent/etc/cni/net.d",
		pod + "volumes.2.hostPath.path: /var/lib/rancher/k3s/data/cni",
		pod + "volumes.4.hostPath.path: /run/addresses",
	}},
	{`metrics: {port: 9000}`, []string{
		container + "args.4: --listen=127.0.0.1:9000", container + "livenessProbe.httpGet.port: 9000", container + "readinessProbe.httpGet.port: 9000",
	}},
	{`metrics: {expose: true}`, []string{container + "args.4: --listen=:9909"}},
	{`metrics: {expose: true, serviceMonitor: {enabled: true, interval: 5s, labels: {release: prometheus}}}`, []string{
		container + "args.4: --listen=:9909",
		"Service.apiVersion: v1", "Service.kind: Service",
		"Service.metadata.labels.app.kubernetes.io/name: ebpfnet-node", "Service.metadata.name: ebpfnet-node", "Service.metadata.namespace: kube-system",
		"Service.spec.clusterIP: None", "Service.spec.ports.0.name: metrics", "Service.spec.ports.0.port: 9909",
		"Service.spec.selector.app.kubernetes.io/name: ebpfnet-node",
		"ServiceMonitor.apiVersion: monitoring.coreos.com/v1", "ServiceMonitor.kind: ServiceMonitor",
		"ServiceMonitor.metadata.labels.release: prometheus", "ServiceMonitor.metadata.name: ebpfnet-node", "ServiceMonitor.metadata.namespace: kube-system",
		"ServiceMonitor.spec.endpoints.0.interval: 5s", "ServiceMonitor.spec.endpoints.0.port: metrics",
		"ServiceMonitor.spec.endpoints.0.relabelings.0.sourceLabels.0: __meta_kubernetes_pod_node_name",
		"ServiceMonitor.spec.endpoints.0.relabelings.0.targetLabel: node",
		"ServiceMonitor.spec.selector.matchLabels.app.kubernetes.io/name: ebpfnet-node",
	}},
	{`resources: {limits: {memory: 500Mi}}`, []string{
		container + "resources.limits.memory: 500Mi", container + "resources.requests.cpu:", container + "resources.requests.memory:",
	}},
	{`tolerations: [{key: a, operator: Exists}]`, []string{pod + "tolerations.0.key: a"}},
	{`nodeSelector: {pool: a}`, []string{pod + "nodeSelector.kubernetes.io/os:", pod + "nodeSelector.pool: a"}},
	{`affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}]}}}`, []string{
		pod + "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms.0.matchExpressions.0.key: a",
		pod + "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms.0.matchExpressions.0.operator: Exists",
	}},
	{`priorityClassName: own`, []string{pod + "priorityClassName: own"}},
	{`updateStrategy: {rollingUpdate: {maxUnavailable: 1}}`, []string{"DaemonSet.spec.updateStrategy.rollingUpdate.maxUnavailable: 1"}},
	{`podAnnotations: {a: b}`, []string{"DaemonSet.spec.template.metadata.annotations.a: b"}},
	{`podLabels: {a: b}`, []string{"DaemonSet.spec.template.metadata.labels.a: b"}},
	{`uninstall: true`, []string{
		pod + "automountServiceAccountToken: false", container + "args.4: --stay", container + "args.5: uninstall",
		container + "livenessProbe.failureThreshold:", container + "livenessProbe.httpGet.host:", container + "livenessProbe.httpGet.path:",
		container + "livenessProbe.httpGet.port:", container + "livenessProbe.periodSeconds:", container + "livenessProbe.timeoutSeconds:",
		container + "readinessProbe.httpGet.host:", container + "readinessProbe.httpGet.path:", container + "readinessProbe.httpGet.port:",
		container + "readinessProbe.periodSeconds:", container + "readinessProbe.timeoutSeconds:",
	}},
}

// TestValues: each value changes what it should, and nothing else, to something that Kubernetes knows.
func TestValues(t *testing.T) {
	plain := mustRender(t, "")
	for _, row := range rows {
		t.Run(row.values, func(t *testing.T) {
			rendered := mustRender(t, row.values)
			slices.Sort(row.want)
			if got := changes(plain, rendered); !slices.Equal(got, row.want) {
				t.Errorf("got changes\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(row.want, "\n"))
			}
			decode(t, rendered["DaemonSet"], &appsv1.DaemonSet{})
			decode(t, rendered["ConfigMap"], &corev1.ConfigMap{})
			if rendered["Service"] != nil {
				decode(t, rendered["Service"], &corev1.Service{})
			}
		})
	}
}

// decode wants Kubernetes to know all fields.
func decode(t *testing.T, from object, into any) {
	t.Helper()
	text, err := json.Marshal(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, into); err != nil {
		t.Fatal(err)
	}
}

// TestAllValuesAreTested: each value of the chart has a row, and a place in the schema.
func TestAllValuesAreTested(t *testing.T) {
	tested := map[string]any{}
	for _, row := range rows {
		var values object
		if err := yaml.Unmarshal([]byte(row.values), &values); err != nil {
			t.Fatal(err)
		}
		flatten("", values, tested)
	}
	known := map[string]any{}
	flatten("", load(t).Values, known)
	for name := range schemaOf(t, "options") {
		known["options."+name] = nil
	}
	for path := range known {
		if !slices.ContainsFunc(keys(tested), func(row string) bool { return row == path || strings.HasPrefix(row, path+".") }) {
			t.Errorf("no row sets %s", path)
		}
	}
	for name := range load(t).Values {
		if schemaOf(t, "")[name] == nil {
			t.Errorf("the schema does not know %s", name)
		}
	}
}

// schemaOf returns the properties that the schema has for a value, or at the top.
func schemaOf(t *testing.T, name string) object {
	t.Helper()
	var schema object
	if err := json.Unmarshal(load(t).Schema, &schema); err != nil {
		t.Fatal(err)
	}
	if name != "" {
		schema = schema["properties"].(object)[name].(object)
	}
	return schema["properties"].(object)
}

func keys(m object) (names []string) {
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// TestOptionsAreAgents: the chart knows the agent's options, but those that are the manifest's business.
func TestOptionsAreAgents(t *testing.T) {
	ours := []string{"node", "kubeconfig", "template", "conflist", "state", "bin-dir", "stay", "listen", "network-policy"}
	want := keys(schemaOf(t, "options"))
	var got []string
	for _, match := range regexp.MustCompile(`flags\.\w+\([^"\n]*"([a-z0-9-]+)", `).FindAllStringSubmatch(readFile(t, agent+"options.go"), -1) {
		if !slices.Contains(ours, match[1]) {
			got = append(got, match[1])
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("got options %q of the agent, but the chart knows %q", got, want)
	}
}

// TestPluginKeysAreDocumented: the chart knows the keys that the plugin's README has, but the agent's own.
func TestPluginKeysAreDocumented(t *testing.T) {
	_, text, _ := strings.Cut(readFile(t, "../../plugin/README.md"), "\n## Keys\n")
	text, _, _ = strings.Cut(text, "\n### ")
	want := []string{"capabilities"}
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]+) \\|").FindAllStringSubmatch(text, -1) {
		for _, key := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(row[1], -1) {
			if key[1] != "cluster" {
				want = append(want, key[1])
			}
		}
	}
	slices.Sort(want)
	if got := keys(schemaOf(t, "plugin")); !slices.Equal(got, want) {
		t.Errorf("got keys %q, want %q", got, want)
	}
}

// TestBadValues are refused, and named.
func TestBadValues(t *testing.T) {
	for values, want := range map[string]string{
		`mdoe: auto`:                                     "mdoe",
		`options: {mdoe: auto}`:                          "mdoe",
		`options: {mode: vxlan}`:                         "/options/mode",
		`options: {port: 0}`:                             "/options/port",
		`options: {port: "4789"}`:                        "/options/port",
		`options: {port: 65536}`:                         "/options/port",
		`options: {vni: 16777216}`:                       "/options/vni",
		`options: {mtu: 500}`:                            "/options/mtu",
		`options: {device: a-name-of-16-bytes}`:          "/options/device",
		`options: {prefer-ipv6: "yes"}`:                  "/options/prefer-ipv6",
		`options: {cluster-cidr: 10.244.0.0/16}`:         "/options/cluster-cidr",
		`options: {cluster-cidr: [10.244.0.0]}`:          "/options/cluster-cidr/0",
		`options: {api-server: "192.0.2.1:6443"}`:        "/options/api-server",
		`options: {listen: ":1"}`:                        "listen",
		`extraArgs: [uninstall]`:                         "/extraArgs/0",
		`image: {tag: "a b"}`:                            "/image/tag",
		`image: {digest: sha256:12}`:                     "/image/digest",
		`image: {pullPolicy: Sometimes}`:                 "/image/pullPolicy",
		`image: ebpfnet-node:1`:                          "/image",
		`plugin: {ipmasq: true}`:                         "ipmasq",
		`plugin: {ipMasq: "yes"}`:                        "/plugin/ipMasq",
		`plugin: {cluster: /a}`:                          "cluster",
		`plugin: {ipam: {type: host-local, ranges: []}}`: "/plugin/ipam",
		`plugin: {ipam: {type: dhcp}}`:                   "/plugin/ipam/type",
		`plugin: {maxFlows: 10}`:                         "/plugin/maxFlows",
		`chainedPlugins: [{type: ebpfnet}]`:              "/chainedPlugins/0/type",
		`conflist: {name: own}`:                          "/conflist",
		`conflist: {cniVersion: 1.0.0, name: own, plugins: [{type: bridge}]}`:                          "/conflist/plugins",
		"conflist: {cniVersion: 1.0.0, name: own, plugins: [{type: ebpfnet}]}\nplugin: {ipMasq: true}": "/plugin",
		`paths: {conflist: etc/cni}`:                     "/paths/conflist",
		`paths: {bin: /opt}`:                             "bin",
		`metrics: {port: 70000}`:                         "/metrics/port",
		`metrics: {serviceMonitor: {enabled: true}}`:     "/metrics/expose",
		`metrics: {serviceMonitor: {interval: often}}`:   "/metrics/serviceMonitor/interval",
		`resources: {limit: {memory: 1Gi}}`:              "limit",
		`tolerations: [{operator: Exist}]`:               "/tolerations/0/operator",
		`nodeSelector: {a: 1}`:                           "/nodeSelector/a",
		`affinity: {node: {}}`:                           "node",
		`updateStrategy: {rollingUpdate: {maxSurge: 1}}`: "/updateStrategy/rollingUpdate/maxSurge",
		`podLabels: {app.kubernetes.io/name: a}`:         "/podLabels/app.kubernetes.io~1name",
		`uninstall: "false"`:                             "/uninstall",
	} {
		_, err := render(t, values)
		if err == nil {
			t.Errorf("%s: got no error, want one", values)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want it to name %s", values, err, want)
		}
	}
}
