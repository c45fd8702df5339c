package main

import "testing"

func TestShort(t *testing.T) {
	for number, want := range map[float64]string{
		0: "0", 0.4: "0", 0.6: "1", 999.4: "999", 999.6: "1.0k", 1234: "1.2k", 99940: "99.9k", 99960: "100k", 999499: "999k", 999500: "1.0M", 12.5e9: "12.5G", 3e17: "300P",
	} {
		if got := short(number); got != want {
			t.Errorf("short(%v): got %s, want %s", number, got, want)
		}
	}
}

func TestDuration(t *testing.T) {
	for seconds, want := range map[float64]string{
		0: "0s", 59.9: "59s", 60: "1m00s", 3599: "59m59s", 3600: "1h00m", 86399: "23h59m", 86400: "1d00h", 432000: "5d00h",
	} {
		if got := duration(&seconds); got != want {
			t.Errorf("duration(%v): got %s, want %s", seconds, got, want)
		}
	}
	if got := duration(nil); got != "" {
		t.Errorf("duration of what is not known: got %q, want nothing", got)
	}
}
