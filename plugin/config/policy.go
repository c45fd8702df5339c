package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// noPolicy is the setting of a container that has no policy.
const noPolicy = "none"

func (c *Config) setPolicies(conf *netConf) (err error) {
	if c.Audit, err = parsePolicyMode(conf.PolicyMode); err != nil {
		return err
	}
	if c.Ingress, err = parseIngressPolicy(conf.Ingress); err != nil || conf.Policy == nil {
		return err
	}
	if conf.Ingress != "" {
		return cnierr.InvalidAt("ingressPolicy", `"policy" is there, too, and says the same in more detail: remove one of them`)
	}
	c.Policy, err = policy.Parse(conf.Policy)
	return err
}

// RuleSets returns what the container admits in each direction. nil: the direction is not isolated.
func (c *Config) RuleSets() (ingress, egress *maps.RuleSet) {
	ingress = policy.FromIngressPolicy(c.Ingress, maps.NetworkToken(c.Attachment.Network))
	if c.Policy != nil {
		ingress, egress = c.Policy.Compile(c.Attachment.Network)
	}
	for _, set := range []*maps.RuleSet{ingress, egress} {
		if set != nil {
			set.Audit = c.Audit
		}
	}
	return ingress, egress
}

func parseIngressPolicy(name string) (policy.IngressPolicy, error) {
	parsed, ok := policy.IngressPolicyOf(cmp.Or(name, policy.Open.String()))
	if !ok {
		return parsed, cnierr.Invalid("ingressPolicy", name, `"open", "same-network" or "isolated"`)
	}
	return parsed, nil
}

func parsePolicyMode(name string) (isAudit bool, err error) {
	if name != "" && name != "enforce" && name != "audit" {
		return false, cnierr.Invalid("policyMode", name, `"enforce" or "audit"`)
	}
	return name == "audit", nil
}

// readPolicy returns the content of a file with a policy in one line, or noPolicy for no name.
func readPolicy(file string) (string, error) {
	if file == "" || file == noPolicy {
		return noPolicy, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return "", cnierr.Invalid("policy", file, fmt.Sprintf("a file with a policy, or none (%v)", err))
	}
	if _, err := policy.Parse(text); err != nil {
		return "", err
	}
	var line bytes.Buffer
	err = json.Compact(&line, text)
	return line.String(), err
}

func (c *Config) applyPolicy(setting string) (err error) {
	if setting != "" {
		c.Policy = nil
	}
	if setting != "" && setting != noPolicy {
		c.Policy, err = policy.Parse([]byte(setting))
	}
	if err == nil && c.Policy != nil && c.Ingress != policy.Open {
		err = cnierr.InvalidAt("policy", "the container has ingressPolicy="+c.Ingress.String()+": set it to open, or remove the policy by policy=none")
	}
	return err
}
