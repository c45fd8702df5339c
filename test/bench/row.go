package main

// row is a line of the tables: a workload on a path, by a kind of uplink.
type row struct{ path, workload, uplink string }

func (r row) title() string {
	return pathTitle(r.path) + ", " + workloadTitle(r.workload) + uplinkTitle(r.uplink)
}

// rows lists all rows, path by path.
func rows() []row {
	var all []row
	for _, p := range paths {
		for _, w := range workloads {
			for _, u := range uplinks {
				if u.isDefault() || w.name == streamName && p.name != podPod {
					all = append(all, row{p.name, w.name, u.name})
				}
			}
		}
	}
	return all
}

// ratios compares a variant with another one in the same row.
func (r *result) ratios(row row, variant, against, family string) []float64 {
	reference := r.ratesOf(row, against, family)
	if row.uplink == bigUplink { // with IPv6, the kernel forwards such packets at a trickle
		byDefault := row
		byDefault.uplink = ""
		reference = better(reference, r.ratesOf(byDefault, against, family))
	}
	return ratios(r.ratesOf(row, variant, family), reference)
}

// better returns the higher rate of each round.
func better(a, b []float64) []float64 {
	var all []float64
	for i := range min(len(a), len(b)) {
		all = append(all, max(a[i], b[i]))
	}
	return all
}

func (r *result) ratesOf(row row, variant, family string) []float64 {
	return r.rates(setupName(variant, row.uplink, smallest), row.path, family, row.workload)
}
