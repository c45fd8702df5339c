package bpf

// Revision orders releases of the programs: raise it with every release that
// changes them. An ADD replaces programs of a lower revision, and other builds of
// its own, but never those of a higher one. So two releases on one host do not
// replace each other's programs in turns.
const Revision = 1

// Build identifies the embedded programs: the first 64 bits of the SHA-256 of
// datapath_bpfel.o. `make generate` writes it, because an ADD would need 7 % longer
// to compute it.
const Build uint64 = 0x3327ad957636ed0e
