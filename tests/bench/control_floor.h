/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bare floor of a prefix look-up between two processes: a SEQPACKET round trip and, for each page, a fast hash of its ids, one
 * probe of a table of a million pages, a comparison of the ids and a reference taken. Tokens lie in shared memory already; there is
 * no page table, no protocol, no safety against a peer that changes its memory. What no daemon can beat on this machine.
 */
#ifndef OSCAR_BENCH_CONTROL_FLOOR_H
#define OSCAR_BENCH_CONTROL_FLOOR_H

#include <stdint.h>

struct control_floor;

/* Token ids of page `page` of path `path`: the same function that fills the daemon measured beside it. */
void control_tokens(uint32_t path, uint32_t first_page, uint32_t pages, uint32_t *ret_tokens);

/* Starts the other process with `paths` paths of `pages` pages each in its table. Exits the program on failure. */
struct control_floor *control_floor_start(uint32_t paths, uint32_t pages);
/* One look-up of a whole path whose ids were put into shared memory before (not timed); returns its time in ns. */
uint64_t control_floor_lookup_ns(struct control_floor *floor, uint32_t path);
/* One round trip of an empty record. */
uint64_t control_floor_roundtrip_ns(struct control_floor *floor);
void control_floor_stop(struct control_floor *floor);

#endif
