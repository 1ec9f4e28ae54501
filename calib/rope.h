/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary position embedding of a captured model: its frequencies, which dimensions turn together, and K before the turn. */
#ifndef OSCAR_CALIB_ROPE_H
#define OSCAR_CALIB_ROPE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cause.h"

#define ROPE_MAX_PAIRS 128U

enum rope_pairing {
    ROPE_UNKNOWN,
    ROPE_NONE,        /* K does not turn, or not in a way that a centre could follow */
    ROPE_HALVES,      /* dims i and i + n/2 of the n turning ones */
    ROPE_INTERLEAVED, /* dims 2i and 2i + 1 */
};

/* What is said about it; what is not: ROPE_UNKNOWN, 0. */
struct rope_given {
    enum rope_pairing pairing;
    double base;
    uint32_t dims; /* that turn, the first ones of a head; 0: all */
};

struct rope {
    uint32_t pairs; /* 0: none */
    enum rope_pairing pairing;
    double omega[ROPE_MAX_PAIRS]; /* radians a token */
};

/* False for a word that is none of "halves", "interleaved" and "none". */
bool rope_read_pairing(const char *word, enum rope_pairing *ret);
const char *rope_pairing_name(enum rope_pairing pairing);

/* omega_i = base^(-2i/dims), or `omega` [omegas] where the model's own frequencies are known (NULL: they are not).
 * ROPE_UNKNOWN or no base and no omega gives no pairs. OSCAR_ERR_INVALID when the sizes do not fit the head. */
int rope_make(const struct rope_given *given, const double *omega, uint64_t omegas, uint32_t head_dim, struct rope *ret,
              struct oscar_cause *cause);

/* The two dimensions of a pair. */
void rope_pair_dims(const struct rope *rope, uint32_t pair, uint32_t *ret_first, uint32_t *ret_second);

/* Adds rows, `count` of them from `position` on, as they were before their turn to sum[head_dim]; dims that do not turn are
 * added as they are. */
void rope_add_unturned(const struct rope *rope, uint64_t position, const float *rows, uint64_t count, uint32_t head_dim,
                       double *sum);

#endif
