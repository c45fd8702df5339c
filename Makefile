# The only place of C flags, and the commands of the project. `make help` lists them.

CLANG       ?= clang-19
LLVM_STRIP  ?= llvm-strip-19
CLANG_FORMAT ?= clang-format-19
# The uapi headers' asm/ stands in the folder of the machine that compiles; BPF is the same for all.
BPF_CFLAGS  := -O2 -g -Wall -Wextra -Wno-unused-parameter -Wno-address-of-packed-member -Werror -mcpu=v3 \
	-I/usr/include/$(shell uname -m)-linux-gnu

.PHONY: generate
generate: ## compile the BPF programs (needs clang-19, llvm-19, libbpf-dev)
	BPF2GO_CC=$(CLANG) BPF2GO_STRIP=$(LLVM_STRIP) BPF2GO_CFLAGS="$(BPF_CFLAGS)" go generate ./bpf
