package firewall

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestReadHanging has a tool that gives no answer, with a child that keeps its output open: it ends, it is named, and
// the rules of the others are read.
func TestReadHanging(t *testing.T) {
	dir := t.TempDir()
	for name, script := range map[string]string{
		"iptables-nft-save":  "sleep 1000; true",
		"ip6tables-nft-save": `printf '*filter\n:FORWARD DROP [0:0]\nCOMMIT\n'`,
		"nft":                `printf '{"nftables": []}'`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	defer func(before time.Duration) { patience = before }(patience)
	patience = 5 * time.Second

	r := Read(t.Context())
	if len(r.Unread) != 1 || r.Unread[0] != "iptables-nft-save: no answer within 5s" {
		t.Errorf("got %q, want the one that hangs", r.Unread)
	}
	if got := r.Judge(out6); got.Fate != IsDropped || !strings.Contains(got.By, "FORWARD") {
		t.Errorf("got %+v, want the rules of the others", got)
	}
}
