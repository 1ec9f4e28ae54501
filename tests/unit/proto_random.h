/* SPDX-License-Identifier: Apache-2.0 */
/* Random legal messages. Structs are zeroed first, so equal messages are equal bytes. */
#ifndef OSCAR_TESTS_PROTO_RANDOM_H
#define OSCAR_TESTS_PROTO_RANDOM_H

#include <stddef.h>
#include <stdint.h>

#include "proto/wire.h"

/* Seeds from the clock, or from OSCAR_TEST_SEED, and prints the seed. */
void random_seed(void);
uint64_t random_u64(void);
/* 0 .. limit - 1 */
uint32_t random_below(uint32_t limit);
/* Any value, small and extreme ones often. */
uint64_t random_number(void);
/* A UTF-8 text of 0 .. capacity - 1 bytes; full: of as many as fit. */
void random_text(char *ret, size_t capacity, bool full);
void random_bytes(void *ret, size_t size);

/* With `full` every text has its full length and every list is full: the largest message of its kind. */
void random_request(enum oscar_verb verb, bool full, struct oscar_request *ret);
void random_reply(enum oscar_verb verb, bool full, struct oscar_reply *ret);
void random_notice(enum oscar_notice_kind kind, bool full, struct oscar_notice *ret);
void random_event(enum oscar_event_kind kind, bool full, struct oscar_event *ret);
void random_admin_request(enum oscar_admin_verb verb, struct oscar_admin_request *ret);
/* Lists are malloced: oscar_admin_reply_free(). */
void random_admin_reply(enum oscar_admin_verb verb, bool full, struct oscar_admin_reply *ret);

/* Changes `bytes` at random: bits, bytes, cuts, insertions. Returns the new size, at most `capacity`. */
size_t random_damage(uint8_t *bytes, size_t size, size_t capacity);

#endif
