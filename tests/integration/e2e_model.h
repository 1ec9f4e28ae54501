/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A synthetic model for tests with several processes. A K or V row is a function of all tokens up to its own, so a page of another
 * path, of another position or from before its bytes were there is seen wherever it is read.
 *
 * The reader's check aims: a query that is six times a key of length 8 puts its whole weight on that key's token, so the output is
 * that token's V row, either as it was stored (a BF16 page) or as the codec leaves it (an INT2 page), and nothing else. Every
 * process can say what both are without having seen the pages.
 *
 * Failures end a test: as a cmocka failure in the process that runs the tests, by exit status 1 in its children.
 */
#ifndef OSCAR_TESTS_E2E_MODEL_H
#define OSCAR_TESTS_E2E_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "oscar/oscar.h"

#include "proto/calibration.h"
#include "tests/support/device_memory.h"

/* --- texts --- */

struct text {
    uint32_t count;
    uint32_t *ids;
    uint64_t *chain; /* a hash of ids[0 .. i] */
};

/* Adds `count` tokens drawn from `seed`: equal appends to equal texts give equal texts. */
void text_append(struct text *text, uint64_t seed, uint32_t count);
struct text text_copy(const struct text *text, uint32_t count); /* the first `count` tokens */
void text_free(struct text *text);
uint32_t text_common_pages(const struct text *a,
                           const struct text *b); /* full pages from the start on that are equal */

/* --- failures --- */

void e2e_child(void); /* called first in a forked child: failures end the process from here on */
__attribute__((format(printf, 1, 2), noreturn)) void e2e_fail(const char *format, ...);
void e2e_must(int result, const char *call, const char *file, int line);
#define MUST(call) e2e_must((call), #call, __FILE__, __LINE__)
/* The call fails with this very error and says why. */
void e2e_refused(int result, int error, const char *call, const char *file, int line);
#define REFUSED(call, error) e2e_refused((call), error, #call, __FILE__, __LINE__)
#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            e2e_fail("%s:%d: not so: %s", __FILE__, __LINE__, #condition);                                             \
    } while (0)

/* --- the worker --- */

struct e2e_worker {
    struct oscar_client *client;
    struct oscar_model *model;
    struct oscar_geometry geometry;
    struct oscar_calibration *calibration; /* the default */
    struct oscar_stream *stream;           /* of extend and of the checks; NULL: inside the calls */
    struct device_memory *memory;          /* for its tensors */
};

/* Two layers, 4 query and 2 KV heads of 64: 64 KiB a dense page, 10 KiB a packed one. */
struct oscar_geometry e2e_geometry(void);
struct oscar_model_options e2e_model_options(const struct oscar_geometry *geometry);
void e2e_worker_open(struct e2e_worker *worker, const char *socket, const char *name);
void e2e_worker_open_geometry(struct e2e_worker *worker, const char *socket, const char *name,
                              const struct oscar_geometry *geometry);
void e2e_worker_close(struct e2e_worker *worker);

/* Device memory for `count` BF16 elements: a copy of these, or NaN. */
struct device_buffer *e2e_buffer(struct e2e_worker *worker, const uint16_t *elements, size_t count);
struct device_buffer *e2e_buffer_poisoned(struct e2e_worker *worker, size_t count);
void e2e_buffer_read(const struct device_buffer *buffer, uint16_t *ret_elements);
/* Fills `bytes` bytes at an address of the device, say of oscar_seq_rows(). */
void e2e_write(struct e2e_worker *worker, void *to, const void *from, size_t bytes);

struct oscar_seq *e2e_open(struct e2e_worker *worker, const struct text *text, uint32_t count, uint32_t flags);
struct oscar_seq_info e2e_info(const struct oscar_seq *seq);
uint32_t e2e_probe(struct e2e_worker *worker, const struct text *text, uint32_t count);

/* Writes K and V of positions first .. first + count - 1 of one layer, or of all. `stream` may be NULL; else the tensors are freed by
 * a call at its end. */
void e2e_store_layer(struct e2e_worker *worker, struct oscar_seq *seq, struct oscar_stream *stream,
                     const struct text *text, uint32_t layer, uint32_t first, uint32_t count);
void e2e_store(struct e2e_worker *worker, struct oscar_seq *seq, struct oscar_stream *stream, const struct text *text,
               uint32_t first, uint32_t count);
/* Reserves, stores and advances from the committed length up to `to`, as far as there is space: 0 or OSCAR_ERR_NO_SPACE. */
int e2e_try_extend(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text, uint32_t to);
/* The same, but goes on where the daemon says that what is being sealed or packed makes room, until it is over: OSCAR_ERR_NO_SPACE means
 * that all is in use. */
int e2e_extend_or_full(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text, uint32_t to);
/* The same to the end, and until all full pages are sealed. A full cache refuses while pages that could go are being sealed or packed;
 * it ends the test when that lasts ten seconds. */
void e2e_extend(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text, uint32_t to);

/* Asks for news until `tokens` of the sequence are read as INT2; ends the test when it takes ten seconds. */
void e2e_settle(struct oscar_seq *seq, uint32_t tokens);

/* Fills the BF16 row of one token (tests that write pages themselves). */
void e2e_row(const struct e2e_worker *worker, const struct text *text, uint32_t layer, uint32_t head, unsigned side,
             uint32_t position, uint16_t *ret_row);

struct e2e_seen {
    uint32_t bf16, int2; /* rows (layer, query head) that were read in this form */
};

/* Attends over the first `tokens` tokens, aimed at `count` positions (all layers and heads), and fails where the output is neither
 * form of the right row. */
struct e2e_seen e2e_check_positions(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text,
                                    uint32_t tokens, const uint32_t *positions, uint32_t count);
struct e2e_seen e2e_check_all(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text,
                              uint32_t tokens);
/* The same for `count` positions drawn from *random. */
struct e2e_seen e2e_check_some(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text,
                               uint32_t tokens, uint64_t *random, uint32_t count);

/* Which form the output row `out` of query head 0 .. is of the token's V; fails as above. For tests that attend themselves. */
bool e2e_is_int2(const struct e2e_worker *worker, const struct text *text, uint32_t layer, uint32_t query_head,
                 uint32_t position, const uint16_t *out);
/* The query row (one query head) that aims at a position. */
void e2e_aim(const struct e2e_worker *worker, const struct text *text, uint32_t layer, uint32_t query_head,
             uint32_t position, uint16_t *ret_q);

uint64_t e2e_random(uint64_t *state); /* splitmix64 */

#endif
