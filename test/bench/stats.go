package main

import (
	"math"
	"slices"
	"time"
)

// histogram counts durations without allocating: short ones in fine buckets, long ones in coarse ones.
type histogram struct {
	count   int
	buckets [buckets]uint32
}

const (
	resolution = 50 * time.Nanosecond
	fine       = 1 << 15 // buckets of this size, up to 1.6 ms
	coarseness = 64      // of the others
	buckets    = 1 << 16 // the last one counts everything from 106 ms on
)

func bucketOf(d time.Duration) int {
	at := int(d / resolution)
	if at >= fine {
		at = fine + (at-fine)/coarseness
	}
	return min(at, buckets-1)
}

// begin is the shortest duration of a bucket.
func begin(bucket int) time.Duration {
	if bucket > fine {
		bucket = fine + (bucket-fine)*coarseness
	}
	return time.Duration(bucket) * resolution
}

func (h *histogram) add(d time.Duration) {
	h.count++
	h.buckets[bucketOf(d)]++
}

// quantile returns the duration that a fraction q of all does not exceed, 0 if there are none.
func (h *histogram) quantile(q float64) time.Duration {
	rank := int(math.Ceil(q * float64(h.count)))
	for i, n := range h.buckets {
		if rank -= int(n); rank <= 0 {
			return begin(i)
		}
	}
	return begin(buckets - 1)
}

// quantile returns the q-quantile, interpolated between two values. It is NaN for no values.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	below := int(at)
	above := min(below+1, len(sorted)-1)
	return sorted[below] + (at-float64(below))*(sorted[above]-sorted[below])
}

// spread is a median with the quartiles around it.
type spread struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

func spreadOf(values []float64) spread {
	return spread{quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75)}
}

// ratios divides values of the same round, because a disturbance of a round affects both. It omits rounds in
// which one of them failed (0).
func ratios(values, against []float64) []float64 {
	var all []float64
	for i := range min(len(values), len(against)) {
		if values[i] > 0 && against[i] > 0 {
			all = append(all, values[i]/against[i])
		}
	}
	return all
}
