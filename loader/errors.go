package loader

import "errors"

// What a caller can do about a failure. Every error of this package that has one
// of these causes wraps it; others are those of the system call, with its object.
var (
	// ErrNotLoaded: the datapath is not loaded in this network namespace. An ADD loads it.
	ErrNotLoaded = errors.New("the datapath is not loaded")
	// ErrIncompatible: the loaded maps have another layout than this binary's.
	ErrIncompatible = errors.New("the loaded datapath belongs to another version of ebpfnet")
	// ErrNotSupported: this host cannot run the datapath. The message says what is missing.
	ErrNotSupported = errors.New("this host cannot run ebpfnet")
)
