/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The programs read the kernel's own structures, which BTF describes. config says whether the
 * kernel has them (Linux 6.6); if not, the verifier removes the code that reads them. Fields
 * that this kernel lacks belong to features that it lacks.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

/* The parts of the kernel's structures that are read. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sk_buff {
	struct net_device *dev;
	unsigned long _nfct;
	__u8 ip_summed : 2;
};

#pragma clang attribute pop

extern void *bpf_cast_to_kern_ctx(void *obj) __ksym __weak;
extern void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym __weak;

/* Takes an address as a pointer to a structure of the kernel. Reading from a wrong one yields 0. */
#define KERNEL_AT(type, address)                                                                   \
	((type *)bpf_rdonly_cast((void *)(address), bpf_core_type_id_kernel(type)))
