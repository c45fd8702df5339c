package plugin

import (
	"context"
	"fmt"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// isPod reports whether the container is a pod, to which the NetworkPolicies of its namespace may apply.
func (v *verb) isPod() bool { return v.config.Cluster != "" && v.config.Pod.Namespace != "" }

// podPolicy returns the index of the policy that the node agent has written for the pod, or 0. isKnown is true if there is
// one, or the pod's namespace has no policies.
func podPolicy(datapath *loader.Datapath, c *config.Config) (index maps.PolicyIndex, isKnown bool, err error) {
	policies, err := nodestate.ReadPolicies(c.Cluster)
	if err != nil || policies.IsOpen(c.Pod.Namespace, time.Now()) {
		return 0, err == nil, err
	}
	if c.Pod.UID == "" {
		return 0, false, fmt.Errorf("%w, because the runtime does not say its UID (K8S_POD_UID in CNI_ARGS)", nodestate.ErrNoPolicy)
	}
	index, err = maps.PodPolicy(datapath, c.Pod.UID)
	return index, index != 0, err
}

// awaitPodPolicy gives the agent time to write the pod's policy.
func (a *adder) awaitPodPolicy(ctx context.Context) error {
	const patience, interval = 2 * time.Second, 5 * time.Millisecond

	ctx, stop := context.WithTimeout(ctx, patience)
	defer stop()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if _, isKnown, err := podPolicy(a.datapath, a.config); err != nil || isKnown {
			return err
		}
		select {
		case <-ctx.Done():
			return nil // addPolicy decides
		case <-ticker.C:
		}
	}
}

// addPolicy writes the container's rules, which its device's entry refers to. Those of NetworkPolicies replace those of the
// configuration, which apply again when the namespace has no policies. It reads the agent's files with the lock held: the agent
// looks for running pods of a namespace after it has written that the namespace has policies.
func (a *adder) addPolicy(store *maps.Store) (index maps.PolicyIndex, err error) {
	if ingress, egress := a.config.RuleSets(); ingress != nil || egress != nil {
		if index, err = store.PutPolicy(a.owner, ingress, egress); err != nil {
			return 0, err
		}
	}
	if !a.isPod() {
		return index, nil
	}
	ofPod, isKnown, err := podPolicy(a.datapath, a.config)
	switch {
	case err != nil:
		return 0, err
	case isKnown && ofPod == 0:
		return index, nil
	case isKnown:
		return ofPod, nil
	case a.config.RefusesPod:
		return 0, fmt.Errorf("%w: is its pod of this node running?", nodestate.ErrNoPolicy)
	}
	a.log.Warn("the node agent has not written the pod's NetworkPolicies, so it can only talk to its node",
		"pod", a.config.Pod.Namespace+"/"+a.config.Pod.Name)
	owner, closed := maps.PodToken(a.config.Pod.UID), &maps.RuleSet{Host: true}
	indexes, err := store.PutPodPolicies([]maps.OwnPolicy{{Owner: owner, Ingress: closed, Egress: closed}})
	return indexes[owner], err
}
