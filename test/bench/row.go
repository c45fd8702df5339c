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
	return ratios(r.ratesOf(row, variant, family), r.ratesOf(row, against, family))
}

func (r *result) ratesOf(row row, variant, family string) []float64 {
	return r.rates(setupName(variant, row.uplink, smallest), row.path, family, row.workload)
}
