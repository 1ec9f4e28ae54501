/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random batches for the tests of attention: pages of all three forms with random contents, a calibration made by hand, and
 * items over them; outputs and every byte that attention must not read are poisoned.
 */
#ifndef OSCAR_TESTS_ATTEND_FIXTURE_H
#define OSCAR_TESTS_ATTEND_FIXTURE_H

#include <stdbool.h>
#include <stdint.h>

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h> /* needs those before it */
/* clang-format on */

#include "oscar/device.h"

#include "kernels/host/host.h"

/* xorshift64*; the seed is OSCAR_TEST_SEED or the clock, and is printed so that a failure can be repeated. */
uint64_t fixture_seed(void);
uint64_t fixture_random(uint64_t *state);
uint32_t fixture_pick(uint64_t *state, uint32_t bound); /* 0..bound-1 */
float fixture_normal(uint64_t *state);                  /* mean 0, deviation 1 */

enum fixture_forms {
    FIXTURE_MIXED,  /* sink, packed history, up to five dense pages at the end: as a sequence lives */
    FIXTURE_RANDOM, /* any form but the first page, which is the sink */
    FIXTURE_PACKED, /* packed pages only */
};

struct fixture_options {
    uint32_t head_dim, group, kv_heads, layers;
    uint32_t dtype;
    int pairs;   /* -1: no centre; 0: a constant one; else rotating pairs */
    bool matrix; /* random orthogonal rotations, else Hadamard */
    enum fixture_forms forms;
    uint32_t distinct; /* pages of each form to repeat in page tables; the last page of an item is its own */
    float key_size;    /* deviation of K: with unit queries the logits' deviation */
    float query_size;  /* 0 makes every logit of a head without centre equal: a uniform softmax */
};

#define FIXTURE_ITEMS 8U

struct fixture {
    struct fixture_options options;
    struct oscar_geometry geometry;
    struct oscar_calibration calibration;
    struct oscar_attend_args args;
    struct oscar_attend_item item[FIXTURE_ITEMS];
    uint8_t *arena[OSCAR_FORMS];
    uint64_t pages[OSCAR_FORMS], used[OSCAR_FORMS], page_bytes[OSCAR_FORMS];
    double *expected[FIXTURE_ITEMS], *expected_lse[FIXTURE_ITEMS]; /* by the oracle, when first asked for */
    void *owned[256];
    uint32_t owned_count;
};

struct fixture *fixture_open(uint64_t *state, const struct fixture_options *options, uint32_t most_pages);
/* Adds an item of `tokens` tokens and `rows` query rows with strides of its own choice. */
void fixture_add(struct fixture *fixture, uint64_t *state, uint32_t tokens, uint32_t rows);
void fixture_close(struct fixture *fixture);

/* Fills the outputs of all items with a pattern that no result has. */
void fixture_poison_outputs(struct fixture *fixture);
/* Runs the batch and fails the test where an output or a log-sum-exp is off by more than `bound` (relative to the largest
 * output of the row, besides the rounding of the output type), or where bytes between the rows were touched. */
void fixture_check(struct fixture *fixture, struct host_pool *pool, enum host_level level, double bound);
/* Largest error of an item's outputs after a run, as fixture_check measures it. The item must stay as it was when first asked. */
double fixture_error(struct fixture *fixture, uint32_t index, double *ret_lse_error);
/* Output element as a number. */
double fixture_out(const struct fixture *fixture, const struct oscar_attend_item *item, uint32_t row, uint32_t head,
                   uint32_t dim);
/* Elements between an item's first and one past its last output element. */
size_t fixture_out_elements(const struct fixture *fixture, const struct oscar_attend_item *item);

#endif
