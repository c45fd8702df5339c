package main

import (
	"fmt"
	"html"
	"math"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The chart has a row of panels for each path and one for ADD and DEL. A panel has one bar for
// each setup. All sizes are in pixels.
const (
	panelWidth, panelHead, panelGap = 224, 24, 20
	rowHead                         = 18
	barHeight, barGap               = 9, 3
	valueWidth                      = 44 // right of the bars
	legendHeight, legendColumns     = 18, 4
	margin                          = 16
)

// panelRow is a row of panels with a title.
type panelRow struct {
	title  string
	panels []panel
}

func (r panelRow) height() int {
	bars := 0
	for _, p := range r.panels {
		bars = max(bars, len(p.bars))
	}
	return rowHead + panelHead + bars*(barHeight+barGap)
}

// panel is a bar chart of one measurement.
type panel struct {
	title string
	bars  []bar
	line  float64 // reference value, 0 for none
}

type bar struct {
	colour string
	spread
	text string
}

// chartWorkloads are the columns.
var chartWorkloads = []string{"udp-packets", "tcp-rr", "tcp-crr", "tcp-stream"}

// chart draws IPv4 only: IPv6 differs little and is in the tables.
func (r *result) chart() string {
	setups := r.present()
	var rows []panelRow
	for _, p := range paths {
		row := panelRow{title: fmt.Sprintf("%s, times %s", p.title, variantTitle(referenceOf(p.name)))}
		for _, workload := range chartWorkloads {
			row.panels = append(row.panels, r.trafficPanel(setups, p, workload))
		}
		rows = append(rows, row)
	}
	rows = append(rows, panelRow{"ADD and DEL, per second", r.callPanels(setups)})
	return draw(r.heading(), legendOf(setups), rows)
}

func (r *result) heading() string {
	return fmt.Sprintf("Longer is faster. IPv4, medians of %d rounds and quartiles. Linux %s, %s",
		r.Rounds, r.Kernel, r.Date.Format("2006-01-02"))
}

func (r *result) trafficPanel(setups []setupResult, p path, workload string) panel {
	all := panel{title: workloadTitle(workload), line: 1}
	against := r.rates(referenceOf(p.name), p.name, testenv.IPv4.Name, workload)
	for i, s := range setups {
		if values := ratios(r.rates(s.Name, p.name, testenv.IPv4.Name, workload), against); len(values) > 0 {
			spread := spreadOf(values)
			all.bars = append(all.bars, bar{colourOf(setups, i), spread, ratio(spread.Median)})
		}
	}
	return all
}

// callPanels shows calls per second, so that longer is faster here as well.
func (r *result) callPanels(setups []setupResult) []panel {
	panels := []panel{
		{title: "ADD, sequential"}, {title: "ADD, 16 concurrent"},
		{title: "DEL, sequential"}, {title: "DEL, 16 concurrent"},
	}
	for i, s := range setups {
		for j, verb := range verbs {
			c := r.calls(s.Name, verb)
			if len(c.Sequential) == 0 || verb == verbs[0] && s.Variant == bareName { // would dwarf all others
				continue
			}
			var sequential []float64
			for _, ms := range c.Sequential {
				sequential = append(sequential, 1000/ms)
			}
			for k, values := range [][]float64{sequential, c.Concurrent} {
				spread := spreadOf(values)
				into := &panels[2*j+k]
				into.bars = append(into.bars, bar{colourOf(setups, i), spread, perSecond(spread.Median)})
			}
		}
	}
	return panels
}

func perSecond(value float64) string {
	if value < 10 {
		return fmt.Sprintf("%.1f", value)
	}
	return fmt.Sprintf("%.0f", value)
}

type legend struct{ colour, title string }

func legendOf(setups []setupResult) []legend {
	var all []legend
	for i, s := range setups {
		all = append(all, legend{colourOf(setups, i), s.Title})
	}
	return all
}

// colourOf returns greens for ebpfnet and other colours for the rest.
func colourOf(setups []setupResult, i int) string {
	ours, others := []string{"#1b9e4b", "#66c27c", "#0b6b31"}, []string{"#555", "#888", "#aaa", "#c7522a", "#e08d5f", "#8a6bbf", "#b9a3dc"}
	n := 0
	for _, s := range setups[:i] {
		if s.Ours == setups[i].Ours {
			n++
		}
	}
	if setups[i].Ours {
		return ours[n%len(ours)]
	}
	return others[n%len(others)]
}

func draw(heading string, legends []legend, rows []panelRow) string {
	columns := len(chartWorkloads)
	legendRows := (len(legends) + legendColumns - 1) / legendColumns
	top := margin + legendHeight + legendRows*legendHeight + panelGap
	width := 2*margin + columns*panelWidth + (columns-1)*panelGap
	height := top + margin - panelGap
	for _, row := range rows {
		height += row.height() + panelGap
	}
	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`+"\n", width, height)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	text(&out, margin, margin+8, "", heading)
	for i, l := range legends {
		x := margin + i%legendColumns*(panelWidth+panelGap)
		y := margin + legendHeight + i/legendColumns*legendHeight
		fmt.Fprintf(&out, `<rect x="%d" y="%d" width="10" height="10" fill="%s"/>`+"\n", x, y, l.colour)
		text(&out, x+15, y+9, "", l.title)
	}
	for _, row := range rows {
		text(&out, margin, top+12, ` font-weight="bold"`, row.title)
		for j, p := range row.panels {
			p.draw(&out, margin+j*(panelWidth+panelGap), top+rowHead)
		}
		top += row.height() + panelGap
	}
	out.WriteString("</svg>\n")
	return out.String()
}

func (p panel) draw(out *strings.Builder, x, y int) {
	text(out, x, y+12, "", p.title)
	longest := p.line
	for _, b := range p.bars {
		longest = math.Max(longest, b.High)
	}
	scale := float64(panelWidth-valueWidth) / longest
	for i, b := range p.bars {
		top := y + panelHead + i*(barHeight+barGap)
		middle := float64(top) + barHeight/2.0
		fmt.Fprintf(out, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", x, top, b.Median*scale, barHeight, b.colour)
		fmt.Fprintf(out, `<path d="M%.1f %.1fH%.1f" stroke="#000"/>`+"\n", float64(x)+b.Low*scale, middle, float64(x)+b.High*scale)
		text(out, x+int(b.High*scale)+4, top+barHeight-1, "", b.text)
	}
	if p.line > 0 {
		at := float64(x) + p.line*scale
		fmt.Fprintf(out, `<path d="M%.1f %dV%d" stroke="#000" stroke-dasharray="2 2"/>`+"\n", at, y+panelHead-3, y+panelHead+len(p.bars)*(barHeight+barGap))
	}
}

func text(out *strings.Builder, x, y int, attributes, content string) {
	fmt.Fprintf(out, `<text x="%d" y="%d"%s>%s</text>`+"\n", x, y, attributes, html.EscapeString(content))
}
