package config

import (
	"cmp"
	"strconv"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// SettingKeys are the keys that ParseSettings knows.
var SettingKeys = []string{"antiSpoof", "ingressPolicy", "policy", "policyMode", "ingressRate", "ingressBurst", "egressRate", "egressBurst"}

// ParseSettings parses KEY=VALUE pairs, whose keys are those of the configuration that can change
// while a container runs. The value of "policy" is a file.
func ParseSettings(pairs []string) (s record.Settings, err error) {
	for _, pair := range pairs {
		key, value, _ := strings.Cut(pair, "=")
		if err := parseSetting(&s, key, value); err != nil {
			return s, err
		}
	}
	return s, new(Config).Apply(s)
}

func parseSetting(s *record.Settings, key, value string) error {
	numbers := map[string]struct {
		field **uint64
		parse func(string, int64) (uint64, error)
	}{
		"ingressRate": {&s.IngressRate, parseRate}, "ingressBurst": {&s.IngressBurst, parseBurst},
		"egressRate": {&s.EgressRate, parseRate}, "egressBurst": {&s.EgressBurst, parseBurst},
	}
	if number, ok := numbers[key]; ok {
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return cnierr.Invalid(key, value, "a number")
		}
		parsed, err := number.parse(key, n)
		*number.field = &parsed
		return err
	}
	switch key {
	case "antiSpoof":
		on, err := strconv.ParseBool(value)
		if err != nil {
			return cnierr.Invalid(key, value, "true or false")
		}
		s.AntiSpoof = &on
		return nil
	case "ingressPolicy":
		policy, err := parseIngressPolicy(value)
		s.IngressPolicy = policy.String()
		return err
	case "policy":
		text, err := readPolicy(value)
		s.Policy = text
		return err
	case "policyMode":
		_, err := parsePolicyMode(value)
		s.PolicyMode = cmp.Or(value, "enforce")
		return err
	default:
		return cnierr.Unsupported(key, value, "expected one of "+strings.Join(SettingKeys, ", "))
	}
}

// Apply overwrites the configuration with settings.
func (c *Config) Apply(s record.Settings) (err error) {
	if s.AntiSpoof != nil {
		c.AntiSpoof = *s.AntiSpoof
	}
	if s.IngressPolicy != "" {
		if c.Ingress, err = parseIngressPolicy(s.IngressPolicy); err != nil {
			return err
		}
	}
	if s.PolicyMode != "" {
		if c.Audit, err = parsePolicyMode(s.PolicyMode); err != nil {
			return err
		}
	}
	c.Bandwidth = s.Limits.Apply(c.Bandwidth)
	return c.applyPolicy(s.Policy)
}
