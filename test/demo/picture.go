package main

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// picture draws the machines, with the names and addresses that they have.
func (s *scene) picture() string {
	const gap = 4 // the length of a wire

	outside := []string{"", testenv.OutsideAddr4.String(), testenv.OutsideAddr6.String()}
	outsideWidth := widest(outside)
	node := []string{testenv.NodeAddr4.String(), testenv.NodeAddr6.String(), "", "no bridge, no rules,", "no daemon"}
	if last := s.pods[len(s.pods)-1]; s.conflist.ports {
		node = append(node, fmt.Sprintf("port %d: %s", hostPort, last.title))
	}
	nodeWidth := widest(node) + 3 + len(s.pods[0].host)
	nodeAt := outsideWidth + frame + gap
	podAt := nodeAt + nodeWidth + frame + gap

	var c canvas
	row := 0
	for _, p := range s.pods {
		lines := []string{testenv.PodIfName}
		for i, addr := range p.addrs() {
			if i > 0 {
				lines = append(lines, "")
			}
			lines[i] = fmt.Sprintf("%-5s %s", lines[i], addr)
		}
		c.box(row, podAt, p.title, lines, podWidth(s.pods))
		c.put(row+1, podAt-gap-2-len(p.host), p.host+" ├────┤")
		row += len(lines) + 2
	}
	lines := append([]string{testenv.UplinkName}, node...)
	for len(lines) < row-2 {
		lines = append(lines, "")
	}
	under := c
	c = canvas{}
	c.box(0, 0, "outside", outside, outsideWidth)
	c.box(0, nodeAt, "node", lines, nodeWidth)
	c.put(1, outsideWidth+frame-2-len(testenv.UplinkName), testenv.UplinkName+" ├────┤")
	c.overlay(under)
	return c.String()
}

func podWidth(pods []*pod) int {
	width := 0
	for _, p := range pods {
		for _, addr := range p.addrs() {
			width = max(width, len(addr.String())+6)
		}
	}
	return width
}

func widest(lines []string) int {
	width := 0
	for _, line := range lines {
		width = max(width, utf8.RuneCountInString(line))
	}
	return width
}

// canvas is a page of characters, each of which stands alone.
type canvas [][]rune

// frame is how much wider a box is than what it holds.
const frame = 4

// put writes text over what is there.
func (c *canvas) put(row, column int, text string) {
	for len(*c) <= row {
		*c = append(*c, nil)
	}
	line := (*c)[row]
	for _, char := range text {
		for len(line) <= column {
			line = append(line, ' ')
		}
		line[column] = char
		column++
	}
	(*c)[row] = line
}

// overlay writes all of another canvas but its blanks.
func (c *canvas) overlay(other canvas) {
	for row, line := range other {
		for column, char := range line {
			if char != ' ' {
				c.put(row, column, string(char))
			}
		}
	}
}

// box draws a frame with a title around lines of at most width characters.
func (c *canvas) box(row, column int, title string, lines []string, width int) {
	rule := strings.Repeat("─", max(0, width+frame-4-utf8.RuneCountInString(title)))
	c.put(row, column, "┌ "+title+" "+rule+"┐")
	for i, line := range lines {
		c.put(row+1+i, column, fmt.Sprintf("│ %-*s │", width, line))
	}
	c.put(row+1+len(lines), column, "└"+strings.Repeat("─", width+frame-2)+"┘")
}

func (c canvas) String() string {
	lines := make([]string, len(c))
	for i, line := range c {
		lines[i] = string(line)
	}
	return strings.Join(lines, "\n")
}
