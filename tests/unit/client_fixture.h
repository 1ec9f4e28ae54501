/* SPDX-License-Identifier: Apache-2.0 */
/* A client of a fake daemon, with a small model open. */
#ifndef OSCAR_TESTS_CLIENT_FIXTURE_H
#define OSCAR_TESTS_CLIENT_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* Behind what it needs but does not include. */
#include <cmocka.h>

#include "oscar/oscar.h"

#include "tests/support/descriptors.h"
#include "tests/support/fake_oscard.h"

#define LAYERS 2U
#define QUERY_HEADS 4U
#define KV_HEADS 2U
#define HEAD_DIM 64U
#define ROW_ELEMENTS (KV_HEADS * HEAD_DIM) /* of K or V of one token */

/* Deadlines: one that is to pass; one that nothing passes that is answered, on whatever machine; and less than that. */
#define SHORT_MS 50U
#define LONG_MS 20000U
#define MARGIN_MS 10000.0

struct client_world {
    struct fake_oscard *fake;
    struct oscar_client *client;
    struct oscar_model *model;
};

/* cmocka set-up and teardown: state is a struct client_world. */
int world_setup(void **state);
int world_teardown(void **state);
/* The same without the model, and without the client; only what some_tokens() gives. */
int client_setup(void **state);
int fake_setup(void **state);
int tokens_setup(void **state);

int open_client(const struct fake_oscard *fake, struct oscar_client **ret);
int open_model(struct oscar_client *client, struct oscar_model **ret);
struct oscar_seq_info seq_info(const struct oscar_seq *seq);
/* `count` different ids. */
const uint32_t *some_tokens(void);
/* One value in all elements of K and V of `count` tokens of one layer. */
int store_value(struct oscar_seq *seq, struct oscar_stream *stream, uint32_t layer, uint32_t first, uint32_t count,
                float value);
/* A sequence with `tokens` tokens of room, the first `committed` of them stored and advanced. */
struct oscar_seq *written_seq(struct oscar_model *model, uint32_t tokens, uint32_t committed);
/* Attention of one row over the first `tokens` tokens of layer 0, into 4 heads of 64 BF16. */
int attend_once(struct oscar_model *model, struct oscar_seq *seq, uint32_t tokens, uint16_t *ret_out);
/* Milliseconds on a clock that goes steadily. */
double now_ms(void);

#define assert_code(expected, call)                                                                                    \
    do {                                                                                                               \
        int code_ = (call);                                                                                            \
        if (code_ != (expected))                                                                                       \
            fail_msg("%s gave %s (%s), expected %s", #call, oscar_error_name(code_), oscar_error_detail(),             \
                     oscar_error_name(expected));                                                                      \
    } while (0)
#define assert_ok(call) assert_code(0, call)

#endif
