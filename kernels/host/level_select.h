/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For level sources: the least and the greatest element of rows that lie across the lanes, and the exact clip threshold,
 * the wanted-th largest magnitude. Magnitudes are compared as the integers that their bits are. A few are kept in order in
 * registers while the row passes by; for more, the threshold's bits are found from the top by counting.
 */
#ifndef OSCAR_KERNELS_HOST_LEVEL_SELECT_H
#define OSCAR_KERNELS_HOST_LEVEL_SELECT_H

#include "kernels/host/level_rows.h"

struct extremes {
    vf low, high; /* least and greatest element */
    vf threshold;
    vi greatest; /* magnitude bits of the largest element: NaN > Inf > every number */
};

/* ---- rows of floats, x[dim][row] ---- */

#define MOST_KEPT 32

LANES_INLINE struct extremes keep_floats(const float *x, uint32_t d, uint32_t wanted, const uint32_t kept) {
    vi top[MOST_KEPT];
    LANES_UNROLL
    for (uint32_t m = 0; m < kept; m++)
        top[m] = vi_set(-1);
    struct extremes found = {.low = vf_load(x), .high = vf_load(x)};
    for (uint32_t j = 0; j < d; j++) {
        vf value = vf_load(x + (size_t)j * ROWS);
        found.low = vf_min(found.low, value);
        found.high = vf_max(found.high, value);
        vi magnitude = vf_bits(value) & INT32_MAX;
        LANES_UNROLL
        for (uint32_t m = 0; m < kept; m++) {
            vi larger = vi_max(top[m], magnitude);
            magnitude = vi_min(top[m], magnitude);
            top[m] = larger;
        }
    }
    vi threshold = top[0];
    LANES_UNROLL
    for (uint32_t m = 1; m < kept; m++)
        threshold = m < wanted ? top[m] : threshold;
    found.greatest = top[0];
    found.threshold = vf_from_bits(threshold);
    return found;
}

/* The greatest pattern that at least `wanted` magnitudes reach. */
static struct extremes count_floats(const float *x, uint32_t d, uint32_t wanted) {
    struct extremes found = keep_floats(x, d, 1, 1);
    vi threshold = vi_set(0);
    for (int bit = 30; bit >= 0; bit--) {
        vi candidate = threshold | vi_set((int32_t)1 << bit);
        vi reached = vi_set(0);
        for (uint32_t j = 0; j < d; j++)
            reached = vi_count_ge(reached, vi_load(x + (size_t)j * ROWS) & INT32_MAX, candidate);
        vi enough = reached >= vi_set((int32_t)wanted);
        threshold |= (vi_set((int32_t)1 << bit)) & enough;
    }
    found.threshold = vf_from_bits(threshold);
    return found;
}

static struct extremes select_floats(const float *x, uint32_t d, uint32_t wanted) {
    if (wanted <= 3)
        return keep_floats(x, d, wanted, 3);
    if (wanted <= 6)
        return keep_floats(x, d, wanted, 6);
    if (wanted <= 8)
        return keep_floats(x, d, wanted, 8);
    if (wanted <= 11)
        return keep_floats(x, d, wanted, 11);
    if (wanted <= 16)
        return keep_floats(x, d, wanted, 16);
    if (wanted <= 24)
        return keep_floats(x, d, wanted, 24);
    if (wanted <= MOST_KEPT)
        return keep_floats(x, d, wanted, MOST_KEPT);
    return count_floats(x, d, wanted);
}

/* ---- rows of BF16 pairs: even and odd dims pass in the two halves of a lane ---- */

#define MOST_PAIRS_KEPT 32

struct pair_bounds {
    vs signed_greatest;
    vu greatest, least;
};

LANES_INLINE void bound_pairs(struct pair_bounds *bounds, vi pair) {
    bounds->signed_greatest = vs_max(bounds->signed_greatest, (vs)pair);
    bounds->greatest = vu_max(bounds->greatest, (vu)pair);
    bounds->least = vu_min(bounds->least, (vu)pair);
}

/* BF16 bits order as sign and magnitude do: as unsigned numbers the most negative element is the greatest, where there is
 * one, and the one nearest to zero the least of either sign. */
LANES_INLINE void bounds_of_rows(const struct pair_bounds *bounds, struct extremes *found) {
    vs negative = (vs)bounds->greatest >> 15;
    vi low = (vi)(((vs)bounds->greatest & negative) | ((vs)bounds->least & ~negative));
    vs all_negative = bounds->signed_greatest >> 15;
    vi high = (vi)(((vs)bounds->least & all_negative) | (bounds->signed_greatest & ~all_negative));
    found->low = vf_min(pair_even(low), pair_odd(low));
    found->high = vf_max(pair_even(high), pair_odd(high));
}

/* The larger of the two halves, as float bits. */
LANES_INLINE vi larger_half(vs pair) { return vi_max((vi)pair << 16, (vi)pair & -65536); }

LANES_INLINE struct extremes keep_pairs(const uint32_t *pairs, uint32_t d, uint32_t wanted, const uint32_t kept) {
    vs top[MOST_PAIRS_KEPT];
    LANES_UNROLL
    for (uint32_t m = 0; m < kept; m++)
        top[m] = (vs)vi_set(-1);
    struct pair_bounds bounds = {(vs)vi_load(pairs), (vu)vi_load(pairs), (vu)vi_load(pairs)};
    for (uint32_t j = 0; j < d / 2; j++) {
        vi pair = vi_load(pairs + (size_t)j * ROWS);
        bound_pairs(&bounds, pair);
        vs magnitude = (vs)pair & INT16_MAX;
        LANES_UNROLL
        for (uint32_t m = 0; m < kept; m++) {
            vs larger = vs_max(top[m], magnitude);
            magnitude = vs_min(top[m], magnitude);
            top[m] = larger;
        }
    }
    struct extremes found;
    bounds_of_rows(&bounds, &found);
    found.greatest = larger_half(top[0]);
    /* Two ordered lists: the threshold is the best, over all ways to take `wanted` from the two, of the least one taken. */
    vi even[MOST_PAIRS_KEPT];
    vi odd[MOST_PAIRS_KEPT];
    LANES_UNROLL
    for (uint32_t m = 0; m < kept; m++) {
        even[m] = (vi)top[m] << 16;
        odd[m] = (vi)top[m] & -65536;
    }
    vi threshold = vi_max(even[wanted - 1], odd[wanted - 1]);
    for (uint32_t m = 1; m < wanted; m++)
        threshold = vi_max(threshold, vi_min(even[m - 1], odd[wanted - 1 - m]));
    found.threshold = vf_from_bits(threshold);
    return found;
}

static struct extremes count_pairs(const uint32_t *pairs, uint32_t d, uint32_t wanted) {
    struct extremes found = keep_pairs(pairs, d, 1, 1);
    vi threshold = vi_set(0);
    for (int bit = 14; bit >= 0; bit--) {
        vi candidate = threshold | vi_set((int32_t)1 << bit);
        vs both = (vs)(candidate | candidate << 16);
        vs reached = (vs)vi_set(0);
        for (uint32_t j = 0; j < d / 2; j++)
            reached = vs_count_ge(reached, (vs)vi_load(pairs + (size_t)j * ROWS) & INT16_MAX, both);
        vi total = ((vi)reached & 0xFFFF) + ((vi)reached >> 16);
        vi enough = total >= vi_set((int32_t)wanted);
        threshold |= vi_set((int32_t)1 << bit) & enough;
    }
    found.threshold = vf_from_bits(threshold << 16);
    return found;
}

static struct extremes select_pairs(const uint32_t *pairs, uint32_t d, uint32_t wanted) {
    if (wanted <= 3)
        return keep_pairs(pairs, d, wanted, 3);
    if (wanted <= 6)
        return keep_pairs(pairs, d, wanted, 6);
    if (wanted <= 8)
        return keep_pairs(pairs, d, wanted, 8);
    if (wanted <= 12)
        return keep_pairs(pairs, d, wanted, 12);
    if (wanted <= 18)
        return keep_pairs(pairs, d, wanted, 18);
    if (wanted <= 24)
        return keep_pairs(pairs, d, wanted, 24);
    if (wanted <= MOST_PAIRS_KEPT)
        return keep_pairs(pairs, d, wanted, MOST_PAIRS_KEPT);
    return count_pairs(pairs, d, wanted);
}

#endif
