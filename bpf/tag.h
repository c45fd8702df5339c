/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Marks in skb->tc_index, which pass information from one hook to the next. */
#pragma once

enum tag {
	TAG_NONE = 0,
	TAG_BYPASS = 0xeb,	 /* bypasses the stack; to_uplink still has to translate it */
	TAG_TRANSLATED = 0xebeb, /* bypasses the stack by fwd_cache, which has translated it */
	/* A copy for the stack alone. Containers can set it, but only slow themselves down with it. */
	TAG_CT_UPDATE = 0xec,
};
