/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/rope.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Rows between two turns that are computed; those between follow by multiplication, which errs by an ulp a step. */
#define EXACT_EVERY 64U

static const char *const names[] = {
    [ROPE_UNKNOWN] = "unknown", [ROPE_NONE] = "none", [ROPE_HALVES] = "halves", [ROPE_INTERLEAVED] = "interleaved"};

bool rope_read_pairing(const char *word, enum rope_pairing *ret) {
    for (enum rope_pairing i = ROPE_NONE; i <= ROPE_INTERLEAVED; i++)
        if (strcmp(word, names[i]) == 0) {
            *ret = i;
            return true;
        }
    return false;
}

const char *rope_pairing_name(enum rope_pairing pairing) { return names[pairing]; }

int rope_make(const struct rope_given *given, const double *omega, uint64_t omegas, uint32_t head_dim, struct rope *ret,
              struct oscar_cause *cause) {
    struct rope rope = {.pairing = given->pairing};
    bool known = given->pairing == ROPE_HALVES || given->pairing == ROPE_INTERLEAVED;
    if (!known || (omega == NULL && given->base == 0)) {
        *ret = rope;
        return 0;
    }
    uint32_t dims = given->dims;
    if (dims == 0)
        dims = omega != NULL && omegas <= head_dim / 2 ? 2 * (uint32_t)omegas : head_dim;
    if (dims % 2 != 0 || dims > head_dim)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "RoPE of %" PRIu32 " dims: a head has %" PRIu32, dims, head_dim);
    if (omega != NULL && omegas != dims / 2)
        return oscar_fail(cause, OSCAR_ERR_INVALID,
                          "tensor rope.omega: expected [%" PRIu32 "] for RoPE of %" PRIu32 " dims, found [%" PRIu64 "]",
                          dims / 2, dims, omegas);
    rope.pairs = dims / 2;
    for (uint32_t i = 0; i < rope.pairs; i++) {
        rope.omega[i] = omega != NULL ? omega[i] : pow(given->base, -2.0 * i / dims);
        if (!(rope.omega[i] >= 0 && rope.omega[i] <= 6.2831853))
            return oscar_fail(cause, OSCAR_ERR_INVALID, "RoPE frequency %" PRIu32 " is %g: expected 0 to 2 pi", i,
                              rope.omega[i]);
    }
    *ret = rope;
    return 0;
}

void rope_pair_dims(const struct rope *rope, uint32_t pair, uint32_t *ret_first, uint32_t *ret_second) {
    bool halves = rope->pairing == ROPE_HALVES;
    *ret_first = halves ? pair : 2 * pair;
    *ret_second = halves ? pair + rope->pairs : 2 * pair + 1;
}

/* The turn of each pair at one position, and from one position to the next. */
struct turn {
    double cos[ROPE_MAX_PAIRS], sin[ROPE_MAX_PAIRS];
};

static void turn_at(const struct rope *rope, double position, struct turn *ret) {
    for (uint32_t i = 0; i < rope->pairs; i++) {
        ret->cos[i] = cos(rope->omega[i] * position);
        ret->sin[i] = sin(rope->omega[i] * position);
    }
}

static void turn_on(uint32_t pairs, const struct turn *step, struct turn *turn) {
    for (uint32_t i = 0; i < pairs; i++) {
        double c = turn->cos[i] * step->cos[i] - turn->sin[i] * step->sin[i];
        turn->sin[i] = turn->sin[i] * step->cos[i] + turn->cos[i] * step->sin[i];
        turn->cos[i] = c;
    }
}

static void add_back(const struct turn *turn, uint32_t pairs, uint32_t apart, uint32_t step, const float *row,
                     double *sum) {
    for (uint32_t i = 0; i < pairs; i++) {
        double x = (double)row[i * step];
        double y = (double)row[i * step + apart];
        sum[i * step] += turn->cos[i] * x + turn->sin[i] * y;
        sum[i * step + apart] += turn->cos[i] * y - turn->sin[i] * x;
    }
}

void rope_add_unturned(const struct rope *rope, uint64_t position, const float *rows, uint64_t count, uint32_t head_dim,
                       double *sum) {
    const bool halves = rope->pairing == ROPE_HALVES;
    struct turn turn;
    struct turn step;
    turn_at(rope, 1, &step);
    for (uint64_t i = 0; i < count; i++, rows += head_dim) {
        if (i % EXACT_EVERY == 0)
            turn_at(rope, (double)(position + i), &turn);
        if (halves)
            add_back(&turn, rope->pairs, rope->pairs, 1, rows, sum);
        else
            add_back(&turn, rope->pairs, 1, 2, rows, sum);
        for (uint32_t j = 2 * rope->pairs; j < head_dim; j++)
            sum[j] += (double)rows[j];
        turn_on(rope->pairs, &step, &turn);
    }
}
