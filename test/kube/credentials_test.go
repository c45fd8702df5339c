package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// credentials are a cluster's key, with which the API server proves what it is and signs service accounts' tokens, and
// the tokens of users.
type credentials struct {
	dir, server string
	certificate []byte
	tokens      strings.Builder
}

// Files in the directory of credentials.
const (
	keyFile         = "key.pem"
	certificateFile = "certificate.pem"
	tokensFile      = "tokens.csv"
)

// newCredentials makes a key and a certificate for it, for an API server with these addresses.
func newCredentials(t *testing.T, server string, addrs ...netip.Addr) *credentials {
	t.Helper()
	c := &credentials{dir: t.TempDir(), server: server}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	testenv.Must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ebpfnet test"},
		DNSNames:  []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, addr := range addrs {
		template.IPAddresses = append(template.IPAddresses, net.IP(addr.AsSlice()))
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	testenv.Must(t, err)
	raw, err := x509.MarshalECPrivateKey(key)
	testenv.Must(t, err)
	c.certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})
	c.write(t, certificateFile, string(c.certificate))
	c.write(t, keyFile, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})))
	return c
}

func (c *credentials) path(name string) string { return filepath.Join(c.dir, name) }

func (c *credentials) write(t *testing.T, name, content string) {
	t.Helper()
	testenv.Must(t, os.WriteFile(c.path(name), []byte(content), 0o600))
}

// user returns the kubeconfig of a user. The API server must be started later: it reads the tokens once.
func (c *credentials) user(t *testing.T, name, group string) string {
	t.Helper()
	token := rand.Text()
	fmt.Fprintf(&c.tokens, "%s,%s,%s,%q\n", token, name, name, group)
	c.write(t, tokensFile, c.tokens.String())
	return c.kubeconfig(token)
}

// kubeconfig returns that of who has a token.
func (c *credentials) kubeconfig(token string) string {
	return fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": [{"name": "c", "cluster": {"server": %q, "certificate-authority-data": %q}}],
		"users": [{"name": "u", "user": {"token": %q}}],
		"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}`,
		c.server, base64.StdEncoding.EncodeToString(c.certificate), token)
}
