// Package chart tests the node agent's manifests as kustomize and Helm give them. It is a module of its own, because
// of Helm's dependencies; it needs neither root nor a cluster.
package chart

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/strvals"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	agent     = "../../cmd/ebpfnet-node/"
	manifests = agent + "manifests"
	namespace = "kube-system"
)

type object = map[string]any

// objects are those of a cluster, by kind. Those for NetworkPolicy have "policy " before it.
type objects map[string]object

// parse returns a cluster's objects from a YAML text.
func parse(t *testing.T, text string) objects {
	t.Helper()
	all := objects{}
	for _, document := range regexp.MustCompile(`(?m)^---$`).Split(text, -1) {
		var o object
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		if o == nil {
			continue
		}
		kind := o["kind"].(string)
		if strings.HasSuffix(o["metadata"].(object)["name"].(string), "-policy") {
			kind = "policy " + kind
		}
		if all[kind] != nil {
			t.Fatalf("got two objects of kind %s, want one", kind)
		}
		all[kind] = o
	}
	return all
}

// kustomize builds what is in a directory.
func kustomize(t *testing.T, dir string) objects {
	t.Helper()
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	text, err := built.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, string(text))
}

func load(t *testing.T) *chart.Chart {
	t.Helper()
	loaded, err := loader.LoadDir(manifests)
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}

// render returns what Helm would install with these values, in YAML.
func render(t *testing.T, values string) (string, error) {
	t.Helper()
	parsed, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		t.Fatal(err)
	}
	loaded := load(t)
	release := chartutil.ReleaseOptions{Name: "any", Namespace: namespace, IsInstall: true}
	final, err := chartutil.ToRenderValues(loaded, parsed, release, nil)
	if err != nil {
		return "", err
	}
	e := engine.Engine{Strict: true}
	files, err := e.Render(loaded, final)
	if err != nil {
		return "", err
	}
	return strings.Join(slices.Collect(maps.Values(files)), "\n---\n"), nil
}

func mustRender(t *testing.T, values string) objects {
	t.Helper()
	text, err := render(t, values)
	if err != nil {
		t.Fatalf("%s: %v", values, err)
	}
	return parse(t, text)
}

// flatten returns the leaves of a value by their paths.
func flatten(path string, value any, leaves map[string]any) {
	switch v := value.(type) {
	case object:
		for key, inner := range v {
			flatten(strings.TrimPrefix(path+"."+key, "."), inner, leaves)
		}
		if len(v) > 0 {
			return
		}
	case []any:
		for i, inner := range v {
			flatten(fmt.Sprintf("%s.%d", path, i), inner, leaves)
		}
		if len(v) > 0 {
			return
		}
	}
	leaves[path] = value
}

// changes returns what is different, as lines "path: value", sorted; gone paths have no value.
func changes(from, to objects) []string {
	before, after := map[string]any{}, map[string]any{}
	for _, side := range []struct {
		objects objects
		leaves  map[string]any
	}{{from, before}, {to, after}} {
		for kind, o := range side.objects {
			flatten(kind, o, side.leaves)
		}
	}
	var lines []string
	for path, value := range after {
		if old, found := before[path]; !found || !reflect.DeepEqual(old, value) {
			lines = append(lines, fmt.Sprintf("%s: %v", path, value))
		}
	}
	for path := range before {
		if _, found := after[path]; !found {
			lines = append(lines, path+":")
		}
	}
	slices.Sort(lines)
	return lines
}

// TestChartIsManifests: without values Helm installs what kustomize builds, and uninstalls in the same way.
func TestChartIsManifests(t *testing.T) {
	for _, row := range []struct{ values, dir string }{
		{"", manifests},
		{"uninstall: true", agent + "uninstall"},
	} {
		built := kustomize(t, row.dir)
		if len(built) != 7 {
			t.Errorf("%s: got %d objects, want 7", row.dir, len(built))
		}
		if got := changes(built, mustRender(t, row.values)); len(got) > 0 {
			t.Errorf("%q differs from %s:\n%s", row.values, row.dir, strings.Join(got, "\n"))
		}
	}
}

// TestNamespace: all that has a namespace is in the release's.
func TestNamespace(t *testing.T) {
	text, err := render(t, "metrics: {expose: true, serviceMonitor: {enabled: true}}")
	if err != nil {
		t.Fatal(err)
	}
	for kind, o := range parse(t, text) {
		if got, want := o["metadata"].(object)["namespace"], !strings.Contains(kind, "Cluster"); (got == namespace) != want {
			t.Errorf("%s: got namespace %v, want one: %v", kind, got, want)
		}
	}
	for _, kind := range []string{"ClusterRoleBinding", "policy ClusterRoleBinding"} {
		if subject := parse(t, text)[kind]["subjects"].([]any)[0].(object); subject["namespace"] != namespace {
			t.Errorf("got %v, want the account in %s", subject, namespace)
		}
	}
}

// TestREADME wants the values of the README's Helm commands to be those that it means.
func TestREADME(t *testing.T) {
	var got []string
	for _, match := range regexp.MustCompile(`--set '?([^ '\n]+)`).FindAllStringSubmatch(readFile(t, manifests+"/README.md"), -1) {
		values, err := strvals.Parse(match[1])
		if err != nil {
			t.Fatalf("%s: %v", match[1], err)
		}
		text, err := yaml.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, changes(mustRender(t, ""), mustRender(t, string(text)))...)
	}
	for _, want := range []string{container + "image: registry.example/ebpfnet-node:0.1.0", container + "args.4: --cluster-cidr=10.244.0.0/16", container + "args.5: uninstall"} {
		if !slices.Contains(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
