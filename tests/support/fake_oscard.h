/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's end of a client's connection, for tests of the client: a thread that listens on a socket of its own, answers every
 * verb in the simplest way that obeys the protocol, and misbehaves where the test asks for it.
 *
 * Its world: one model; sequences whose hits the test sets; pages that are numbered upwards. Nothing is packed or shared.
 */
#ifndef OSCAR_TESTS_FAKE_OSCARD_H
#define OSCAR_TESTS_FAKE_OSCARD_H

#include <stdbool.h>
#include <stdint.h>

#include "oscar/device.h"

#include "proto/window.h"
#include "proto/wire.h"

#define FAKE_CHUNK_PAGES 16U
#define FAKE_MAX_PAGES 256U
#define FAKE_MODEL ((UINT64_C(1) << 32) | 7)

struct fake_oscard;

struct fake_oscard *fake_oscard_start(void);
void fake_oscard_stop(struct fake_oscard *fake); /* the client may still be there, or gone */
const char *fake_oscard_socket(const struct fake_oscard *fake);

/* --- what it does with a verb ------------------------------------------------------------------------------------- */

/* Sees each reply before it is sent, in the fake's thread, and may change it. Returns false to send nothing. */
typedef bool fake_change(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply);

void fake_oscard_change(struct fake_oscard *fake, enum oscar_verb verb, fake_change *change); /* NULL: as it is */
void fake_oscard_fail(struct fake_oscard *fake, enum oscar_verb verb, int error, const char *cause); /* 0: no longer */
/* Requests of this verb are not answered until they are let go, then in the order in which they came. */
void fake_oscard_hold(struct fake_oscard *fake, enum oscar_verb verb);
void fake_oscard_let_go(struct fake_oscard *fake, enum oscar_verb verb);
/* Ends the connection instead of answering. */
void fake_oscard_die_at(struct fake_oscard *fake, enum oscar_verb verb);

/* --- its world ---------------------------------------------------------------------------------------------------- */

void fake_oscard_set_hit(struct fake_oscard *fake, uint32_t hit_tokens, uint32_t in_flight_tokens);
/* Updates that the next SEQ_ADVANCE brings. */
void fake_oscard_queue_update(struct fake_oscard *fake, uint32_t page, oscar_page_ref ref);
/* Raises the window's counter of updates waiting. */
void fake_oscard_raise_updates(struct fake_oscard *fake);
oscar_fence_slot *fake_oscard_fence(struct fake_oscard *fake, uint32_t slot);
/* The memory of a page, as the daemon sees it. */
uint8_t *fake_oscard_page(struct fake_oscard *fake, oscar_page_ref ref);
/* For fake_change: where the updates of the window lie. */
struct oscar_page_update *fake_oscard_updates(struct fake_oscard *fake);
struct oscar_window_header *fake_oscard_window(struct fake_oscard *fake);

/* --- saying things unasked ---------------------------------------------------------------------------------------- */

/* A chunk of its world, with `info` as the test likes it; the memory is that of (info->form, index 0 or 1). */
void fake_oscard_announce(struct fake_oscard *fake, const struct oscar_chunk_info *info);
struct oscar_chunk_info fake_oscard_chunk(struct fake_oscard *fake, enum oscar_form form, uint32_t index);
void fake_oscard_gone(struct fake_oscard *fake, const struct oscar_chunk_info *info);
void fake_oscard_send(struct fake_oscard *fake, const struct oscar_reply *reply);
/* Any bytes as the payload of a record, with copies of a descriptor. */
void fake_oscard_send_bytes(struct fake_oscard *fake, enum oscar_record_kind kind, const void *bytes, uint32_t size,
                            unsigned fds);

/* --- what it has seen --------------------------------------------------------------------------------------------- */

unsigned fake_oscard_count(struct fake_oscard *fake, enum oscar_verb verb);
/* The last request of a verb; its tokens, at most 4096 of them, are fake_oscard_tokens(). */
struct oscar_request fake_oscard_last(struct fake_oscard *fake, enum oscar_verb verb);
const uint32_t *fake_oscard_tokens(struct fake_oscard *fake, enum oscar_verb verb);
/* The sequence's fence counter at the moment when the last request of the verb arrived. */
uint64_t fake_oscard_fence_then(struct fake_oscard *fake, enum oscar_verb verb);
/* Waits until it has seen the client's end, where that has come: then it holds no connection. */
void fake_oscard_settle(struct fake_oscard *fake);
/* Waits until `count` requests of the verb have come: false after twenty seconds. */
bool fake_oscard_wait(struct fake_oscard *fake, enum oscar_verb verb, unsigned count);

#endif
