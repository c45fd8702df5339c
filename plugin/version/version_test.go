package version

import "testing"

func TestOfModule(t *testing.T) {
	for module, want := range map[string]string{"v1.2.3": "1.2.3", "v0.1.0-rc.1": "0.1.0-rc.1", "(devel)": "devel", "": "devel"} {
		if got := ofModule(module); got != want {
			t.Errorf("version of module %q: got %q, want %q", module, got, want)
		}
	}
}

func TestStringIsTheLinkers(t *testing.T) {
	release = "4.5.6"
	defer func() { release = "" }()
	if got := String(); got != release {
		t.Errorf("version: got %q, want %q as the linker has set", got, release)
	}
}
