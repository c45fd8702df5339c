package main

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/ebpfnet/ebpfnet/test/policies"
)

// judges are evaluators that others wrote. They return verdicts on each connection.
var judges = map[string]func(policies.Case) []policies.Verdict{
	"cyclonus": cyclonus, "kube-network-policies": kubeNetworkPolicies,
}

// mistakes are the known differences: a judge is not heard about a direction with such rules.
var mistakes = []struct {
	judge, reason string
	about         func(rules []policies.Rule) bool
}{
	{"kube-network-policies", "it takes an empty list of rules for a rule that admits everything; API servers give it no list instead",
		func(rules []policies.Rule) bool { return rules != nil && len(rules) == 0 }},
}

// hears reports whether the judge decides about a direction with these rules.
func hears(judge string, rules []policies.Rule) bool {
	for _, mistake := range mistakes {
		if mistake.judge == judge && mistake.about(rules) {
			return false
		}
	}
	return true
}

// agreed returns the verdict of all judges on each connection, or an error if they differ.
func agreed(c policies.Case) ([]policies.Verdict, error) {
	votes := map[string][]policies.Verdict{}
	for name, verdicts := range judges {
		votes[name] = verdicts(c)
	}
	verdicts := make([]policies.Verdict, len(c.Connections))
	for i, conn := range c.Connections {
		egress, errEgress := unanimous(c.Policies[conn.From.Name].Egress, func(judge string) bool { return votes[judge][i].Egress })
		ingress, errIngress := unanimous(c.Policies[conn.To.Name].Ingress, func(judge string) bool { return votes[judge][i].Ingress })
		if err := errors.Join(errEgress, errIngress); err != nil {
			text, _ := json.Marshal(c.Policies)
			return nil, fmt.Errorf("%+v: %w; the policies are %s", conn, err, text)
		}
		verdicts[i] = policies.Verdict{Egress: egress, Ingress: ingress}
	}
	return verdicts, nil
}

// unanimous returns the vote of the judges that are heard about these rules.
func unanimous(rules []policies.Rule, vote func(judge string) bool) (bool, error) {
	voters := map[bool]string{}
	for judge := range judges {
		if hears(judge, rules) {
			voters[vote(judge)] = judge
		}
	}
	if len(voters) != 1 {
		return false, fmt.Errorf("%s admits it, %s does not", voters[true], voters[false])
	}
	return voters[true] != "", nil
}
