/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/rope.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

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

void rope_add_unturned(const struct rope *rope, uint64_t position, const float *row, uint32_t head_dim, double *sum) {
    for (uint32_t i = 0; i < rope->pairs; i++) {
        uint32_t first;
        uint32_t second;
        rope_pair_dims(rope, i, &first, &second);
        double angle = rope->omega[i] * (double)position;
        double c = cos(angle);
        double s = sin(angle);
        sum[first] += c * (double)row[first] + s * (double)row[second];
        sum[second] += c * (double)row[second] - s * (double)row[first];
    }
    for (uint32_t j = 2 * rope->pairs; j < head_dim; j++)
        sum[j] += (double)row[j];
}
