package loader

import "errors"

// Causes that a caller can act on. Every error of this package with such a cause
// wraps it; the others wrap that of the failed system call and name its object.
var (
	// ErrNotLoaded: the datapath is not loaded in this network namespace. An ADD will load it.
	ErrNotLoaded = errors.New("the datapath is not loaded")
	// ErrIncompatible: the layout of the loaded maps is not this binary's.
	ErrIncompatible = errors.New("the loaded datapath belongs to another version of ebpfnet")
	// ErrNotSupported: this host cannot run the datapath. The message names what is missing.
	ErrNotSupported = errors.New("this host cannot run ebpfnet")
)
