package main

import (
	"fmt"
	"math"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The chart of scale has a panel for each dimension and a line for each workload. A bare veth, with the
// same load on the other CPU, is dashed.
const (
	curveHeight          = 150
	curveGap             = 56 // for the sizes at the left
	lowestRate, topRate  = 0.5, 1.2
	sizesHeight          = 34
	scaleLegendLineWidth = 18
)

// curve is the rates of a workload in a dimension, relative to the smallest size.
type curve struct {
	colour string
	dashed bool
	rates  []spread // NaN: not measured
}

var curveColours = []string{"#1b9e4b", "#3b6fb5", "#c7522a"}

// scaleChart draws rates over sizes: flat lines cost the same at each size.
func (r *result) scaleChart() string {
	width := margin + len(dimensions)*(panelWidth+curveGap) + margin
	top := margin + 2*legendHeight + panelGap
	height := top + panelHead + curveHeight + sizesHeight + margin
	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`+"\n", width, height)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	text(&out, margin, margin+8, "", fmt.Sprintf("Rates of %s, times those with one of each. All paths, IPv4 and IPv6: medians and quartiles. Linux %s, %s",
		variantTitle(establishedName), r.Kernel, r.Date.Format("2006-01-02")))
	x := margin
	for i, workload := range scaledWorkloads {
		fmt.Fprintf(&out, `<path d="M%d %dh%d" stroke="%s" stroke-width="2"/>`+"\n", x, margin+legendHeight+6, scaleLegendLineWidth, curveColours[i])
		text(&out, x+scaleLegendLineWidth+5, margin+legendHeight+10, "", workloadTitle(workload))
		x += panelWidth
	}
	text(&out, x, margin+legendHeight+10, "", "dashed: "+variantTitle(bareName)+" beside the same load")
	for i, d := range dimensions {
		r.drawDimension(&out, d, margin+curveGap+i*(panelWidth+curveGap), top)
	}
	out.WriteString("</svg>\n")
	return out.String()
}

func (r *result) drawDimension(out *strings.Builder, d dimension, x, y int) {
	text(out, x, y+12, ` font-weight="bold"`, d.name)
	y += panelHead
	for _, rate := range []float64{0.6, 0.8, 1, 1.2} {
		at := yOf(y, rate)
		fmt.Fprintf(out, `<path d="M%d %.1fh%d" stroke="#ccc"/>`+"\n", x, at, panelWidth)
		text(out, x-28, int(at)+4, "", ratio(rate))
	}
	step := panelWidth / len(d.sizes)
	for i, size := range append([]int{*d.of(&smallest)}, d.sizes...) {
		text(out, x+i*step, y+curveHeight+16, ` text-anchor="middle"`, thousands(size))
	}
	for _, c := range r.curves(d) {
		c.draw(out, x, y, step)
	}
}

func yOf(top int, rate float64) float64 {
	rate = min(max(rate, lowestRate), topRate)
	return float64(top) + curveHeight*(topRate-rate)/(topRate-lowestRate)
}

// curves returns a curve for each workload that was measured.
func (r *result) curves(d dimension) []curve {
	var all []curve
	for _, variant := range []string{establishedName, bareName} {
		for i, workload := range scaledWorkloads {
			c := curve{colour: curveColours[i], dashed: variant == bareName, rates: []spread{{1, 1, 1}}}
			measured := false
			for _, size := range d.sizes {
				rates := r.relativeRates(variant, d.at(size), workload)
				measured = measured || len(rates) > 0
				c.rates = append(c.rates, spreadOf(rates))
			}
			if measured {
				all = append(all, c)
			}
		}
	}
	return all
}

// relativeRates returns the ratios of all paths, families and rounds.
func (r *result) relativeRates(variant string, at scale, workload string) []float64 {
	var all []float64
	for _, p := range paths {
		for _, f := range testenv.Families {
			rates := r.rates(setupName(variant, "", at), p.name, f.Name, workload)
			all = append(all, ratios(rates, r.rates(variant, p.name, f.Name, workload))...)
		}
	}
	return all
}

func (c curve) draw(out *strings.Builder, x, y, step int) {
	var line strings.Builder
	for i, rate := range c.rates {
		if math.IsNaN(rate.Median) {
			continue
		}
		command := "L"
		if line.Len() == 0 {
			command = "M"
		}
		fmt.Fprintf(&line, "%s%d %.1f", command, x+i*step, yOf(y, rate.Median))
		fmt.Fprintf(out, `<path d="M%d %.1fV%.1f" stroke="%s"/>`+"\n", x+i*step, yOf(y, rate.Low), yOf(y, rate.High), c.colour)
	}
	dashes := ""
	if c.dashed {
		dashes = ` stroke-dasharray="3 3"`
	}
	fmt.Fprintf(out, `<path d="%s" fill="none" stroke="%s" stroke-width="2"%s/>`+"\n", line.String(), c.colour, dashes)
}
