/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Built once a level: one dense record to one packed record. The 64 rows of a page lie across the lanes, so that no step
 * works across a register: the clip rank, the feedback's order of terms and both byte orders of the page are plain
 * element-wise code, and each row sees exactly the operations of the oracle (kernels/codec.c).
 */
#include "kernels/host/level_functions.h"
#include "kernels/host/level_rows.h"
#include "kernels/host/level_select.h"

#define MAX_WIDE (MAX_DIM / 64U)
#define STEP 4U /* dims that are coded together: the four bytes of a K word */

/* Registers of rows that one pass of the feedback or the centre carries for its STEP dims. */
#if HOST_LEVEL == 2
#define GROUPS 4U
#else
#define GROUPS 2U
#endif

struct host_pack_scratch {
    uint32_t pairs[MAX_DIM / 2 * ROWS];    /* the rows as the page holds them */
    float x[MAX_DIM * ROWS];               /* K less its centre; with feedback, the errors from the top down */
    float row_cos[OSCAR_MAX_PAIRS * ROWS]; /* T of the head's rotating pairs */
    float row_sin[OSCAR_MAX_PAIRS * ROWS];
    float angle_cos[OSCAR_MAX_PAIRS * ROWS]; /* T joined with a page's E */
    float angle_sin[OSCAR_MAX_PAIRS * ROWS];
    float feedback[MAX_DIM * (MAX_DIM + STEP) / 2]; /* the head's L in the order of use: see arrange_feedback() */
    uint32_t k_words[4U * MAX_WIDE * ROWS];         /* [w][t][row] */
    uint16_t v_halves[8U * MAX_WIDE * ROWS];        /* [r][g][row] */
    uint16_t scale[2][ROWS], zero[2][ROWS];         /* of K and V */
    const struct oscar_calibration *calibration;
    const struct oscar_head_calibration *head;
};

size_t HOST_NAME(level_pack_scratch_bytes)(void) { return sizeof(struct host_pack_scratch); }

/* L as code_k_feedback() reads it, without a gap: step by step from the top, columns base .. base + STEP - 1 of the rows
 * d-1 .. base. In the file's order each step would touch a quarter of every cache line. */
static void arrange_feedback(const float *feedback, uint32_t d, float *ret) {
    for (uint32_t base = d; base > 0;) {
        base -= STEP;
        for (uint32_t i = d; i-- > base; ret += STEP)
            memcpy(ret, feedback + (size_t)i * d + base, STEP * sizeof(*ret));
    }
}

void HOST_NAME(level_pack_begin)(struct host_pack_scratch *scratch, const struct oscar_calibration *calibration,
                                 const struct oscar_head_calibration *head) {
    scratch->calibration = calibration;
    scratch->head = head;
    if (head->feedback)
        arrange_feedback(head->feedback, calibration->head_dim, scratch->feedback);
    const struct oscar_turns *turns = &calibration->turns;
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t i = 0; i < head->pairs; i++) {
            const float *t = turns->row_turn + ((size_t)row * turns->frequencies + (size_t)head->centre_pair[i]) * 2;
            scratch->row_cos[i * ROWS + row] = t[0];
            scratch->row_sin[i * ROWS + row] = t[1];
        }
}

/* x = row - c'(position), in the order of oscar_codec_centre(). */
static void take_out_centre(struct host_pack_scratch *scratch, uint64_t position) {
    const struct oscar_head_calibration *head = scratch->head;
    const struct oscar_turns *turns = &scratch->calibration->turns;
    const uint32_t d = scratch->calibration->head_dim;
    const float *page_turn = turns->page_turn + position / OSCAR_PAGE_TOKENS * turns->frequencies * 2;
    for (uint32_t i = 0; i < head->pairs; i++) {
        const float *e = page_turn + (size_t)head->centre_pair[i] * 2;
        vf cos_page = vf_set(e[0]);
        vf sin_page = vf_set(e[1]);
        for (uint32_t row = i * ROWS; row < (i + 1) * ROWS; row += LANES) {
            vf cos_row = vf_load(scratch->row_cos + row);
            vf sin_row = vf_load(scratch->row_sin + row);
            vf_store(scratch->angle_cos + row, vf_fma(cos_page, cos_row, -(sin_page * sin_row)));
            vf_store(scratch->angle_sin + row, vf_fma(sin_page, cos_row, cos_page * sin_row));
        }
    }
    for (uint32_t dim = 0; dim < d; dim += STEP)
        for (uint32_t row = 0; row < ROWS; row += GROUPS * LANES) {
            vf centre[STEP][GROUPS];
            LANES_UNROLL
            for (uint32_t j = 0; j < STEP; j++)
                LANES_UNROLL
            for (uint32_t g = 0; g < GROUPS; g++)
                centre[j][g] = vf_set(head->centre_static[dim + j]);
            for (uint32_t i = 0; i < head->pairs; i++) {
                const float *a = head->centre_cos + (size_t)i * d + dim;
                const float *b = head->centre_sin + (size_t)i * d + dim;
                LANES_UNROLL
                for (uint32_t g = 0; g < GROUPS; g++) {
                    vf cos_angle = vf_load(scratch->angle_cos + (size_t)i * ROWS + row + (size_t)g * LANES);
                    LANES_UNROLL
                    for (uint32_t j = 0; j < STEP; j++)
                        centre[j][g] = vf_fma(cos_angle, vf_set(a[j]), centre[j][g]);
                }
                LANES_UNROLL
                for (uint32_t g = 0; g < GROUPS; g++) {
                    vf sin_angle = vf_load(scratch->angle_sin + (size_t)i * ROWS + row + (size_t)g * LANES);
                    LANES_UNROLL
                    for (uint32_t j = 0; j < STEP; j++)
                        centre[j][g] = vf_fma(sin_angle, vf_set(b[j]), centre[j][g]);
                }
            }
            LANES_UNROLL
            for (uint32_t j = 0; j < STEP; j += 2)
                LANES_UNROLL
            for (uint32_t g = 0; g < GROUPS; g++) {
                size_t column = row + (size_t)g * LANES;
                vi pair = vi_load(scratch->pairs + (size_t)((dim + j) / 2) * ROWS + column);
                vf_store(scratch->x + (size_t)(dim + j) * ROWS + column, pair_even(pair) - centre[j][g]);
                vf_store(scratch->x + (size_t)(dim + j + 1) * ROWS + column, pair_odd(pair) - centre[j + 1][g]);
            }
        }
}

static void expand_pairs(struct host_pack_scratch *scratch, uint32_t d) {
    for (uint32_t dim = 0; dim < d; dim += 2)
        for (uint32_t row = 0; row < ROWS; row += LANES) {
            vi pair = vi_load(scratch->pairs + (size_t)(dim / 2) * ROWS + row);
            vf_store(scratch->x + (size_t)dim * ROWS + row, pair_even(pair));
            vf_store(scratch->x + (size_t)(dim + 1) * ROWS + row, pair_odd(pair));
        }
}

/* Scale and zero of every row of a side, taken from x or, where x is NULL, from the pairs. False when a row holds NaN or
 * Inf, or a scale overflows binary16. */
static bool find_scales(struct host_pack_scratch *scratch, const float *x, uint32_t d, uint32_t rank, unsigned side) {
    vi greatest = vi_set(0);
    vi greatest_scale = vi_set(0);
    for (uint32_t row = 0; row < ROWS; row += LANES) {
        uint16_t *scale = scratch->scale[side] + row;
        struct extremes found =
            x ? select_floats(x + row, d, d - rank) : select_pairs(scratch->pairs + row, d, d - rank);
        vf low = vf_max(found.low, -found.threshold) + 0.0F; /* + 0: a minimum of -0 counts as +0, as in the oracle */
        vf high = vf_min(found.high, found.threshold);
        vf step = (high - low) / 3.0F;
        step = vf_max(step, found.threshold * 0x1p-10F);
        step = vf_max(step, vf_set(0x1p-24F));
        vf_to_fp16(step, scale);
        vf_to_fp16(-low / vf_from_fp16(scale), scratch->zero[side] + row);
        greatest = vi_max(greatest, found.greatest);
        greatest_scale = vi_max(greatest_scale, vi_load_u16(scale));
    }
    return vi_reduce_max(greatest) < 0x7F800000 && vi_reduce_max(greatest_scale) < 0x7C00;
}

/*
 * Rounding to nearest of finite rows. The oracle clamps the code; here x is clamped to the elements that the codes 0 and 3
 * stand for, which gives the same code, as codes rise with x. Then the quotient is made without a division: with
 * r = 1 / scale rounded and q = x * r, fma(fma(-q, scale, x), r, q) is x / scale rounded to nearest (Markstein; checked for
 * all 2^33 pairs of a binary32 significand and one of the 1,024 significands that a binary16 scale can have). Where x is so
 * small that the inner fma underflows, the quotient is too small to show beside zero + 0.5.
 */
struct nearest {
    vf scale, zero, reciprocal, low, high;
};

LANES_INLINE struct nearest nearest_of(const struct host_pack_scratch *scratch, unsigned side, uint32_t row) {
    vf scale = vf_from_fp16(scratch->scale[side] + row);
    vf zero = vf_from_fp16(scratch->zero[side] + row);
    return (struct nearest){
        .scale = scale,
        .zero = zero,
        .reciprocal = 1.0F / scale,
        .low = -zero * scale,
        .high = (3.0F - zero) * scale,
    };
}

LANES_INLINE vi nearest_code(const struct nearest *n, vf x) {
    x = vf_min(vf_max(x, n->low), n->high);
#if HOST_LEVEL > 0
    vf quotient = x * n->reciprocal;
    quotient = vf_fma(vf_fnma(quotient, n->scale, x), n->reciprocal, quotient);
#else
    vf quotient = x / n->scale; /* where an fma is a call, a division is the cheaper way to the same bits */
#endif
    return vf_truncate(quotient + n->zero + 0.5F);
}

/* The codes of dims dim and dim + 1, the second one `apart` bits above the first. */
LANES_INLINE vi nearest_pair(const struct host_pack_scratch *scratch, const float *x, const struct nearest *n,
                             uint32_t dim, uint32_t row, const int apart) {
    vf even;
    vf odd;
    if (x) {
        even = vf_load(x + (size_t)dim * ROWS + row);
        odd = vf_load(x + (size_t)(dim + 1) * ROWS + row);
    } else {
        vi pair = vi_load(scratch->pairs + (size_t)(dim / 2) * ROWS + row);
        even = pair_even(pair);
        odd = pair_odd(pair);
    }
    return nearest_code(n, even) | nearest_code(n, odd) << apart;
}

LANES_INLINE void code_k_nearest(struct host_pack_scratch *scratch, const float *x, const uint32_t wide) {
    for (uint32_t row = 0; row < ROWS; row += LANES) {
        const struct nearest n = nearest_of(scratch, 0, row);
        for (uint32_t w = 0; w < wide; w++)
            for (uint32_t t = 0; t < 4; t++) {
                vi word = vi_set(0);
                LANES_UNROLL
                for (uint32_t f = 0; f < 4; f++) {
                    uint32_t dim = 16 * (wide * f + w) + 4 * t;
                    word |= nearest_pair(scratch, x, &n, dim, row, 8) << (int)(2 * f);
                    word |= nearest_pair(scratch, x, &n, dim + 2, row, 8) << (int)(16 + 2 * f);
                }
                vi_store(scratch->k_words + (size_t)(4 * w + t) * ROWS + row, word);
            }
    }
}

/* Dims g and g + 1 in the two halves of a lane, taken apart at the end. */
LANES_INLINE void code_v(struct host_pack_scratch *scratch, const uint32_t wide) {
    for (uint32_t row = 0; row < ROWS; row += LANES) {
        const struct nearest n = nearest_of(scratch, 1, row);
        for (uint32_t r = 0; r < wide; r++)
            for (uint32_t g = 0; g < 8; g += 2) {
                vi halves = vi_set(0);
                LANES_UNROLL
                for (uint32_t i = 0; i < 8; i++)
                    halves |= nearest_pair(scratch, NULL, &n, 8 * (wide * i + r) + g, row, 16) << (int)(2 * i);
                vi_store_u16(scratch->v_halves + (size_t)(8 * r + g) * ROWS + row, halves);
                vi_store_u16(scratch->v_halves + (size_t)(8 * r + g + 1) * ROWS + row, (halves >> 16) & 0xFFFF);
            }
    }
}

/* As in the oracle, for values that need not be finite. Clamped before the conversion: floor(v) clamped to 0..3 is v clamped
 * to 0..3 and truncated; a NaN counts as 0. */
LANES_INLINE vf feedback_code(vf value, vf scale, vf zero) {
    vf code = value / scale + zero + 0.5F;
    return vf_whole(vf_min(vf_max(code, vf_set(0.0F)), vf_set(3.0F)));
}

/*
 * Feedback rounding, STEP dims at a time from the top. The errors of all higher dims lie in x already; each dim takes their
 * terms in descending order, then those of the step itself, which is the order of the oracle.
 */
static void code_k_feedback(struct host_pack_scratch *scratch, uint32_t d) {
    const uint32_t wide = d / 64;
    for (uint32_t row = 0; row < ROWS; row += GROUPS * LANES) {
        float *x = scratch->x + row;
        const float *line = scratch->feedback;
        vf scale[GROUPS];
        vf zero[GROUPS];
        for (uint32_t g = 0; g < GROUPS; g++) {
            scale[g] = vf_from_fp16(scratch->scale[0] + row + (size_t)g * LANES);
            zero[g] = vf_from_fp16(scratch->zero[0] + row + (size_t)g * LANES);
        }
        for (uint32_t base = d; base > 0;) {
            base -= STEP;
            vf t[STEP][GROUPS];
            LANES_UNROLL
            for (uint32_t j = 0; j < STEP; j++)
                LANES_UNROLL
            for (uint32_t g = 0; g < GROUPS; g++)
                t[j][g] = vf_load(x + (size_t)(base + j) * ROWS + (size_t)g * LANES);
            for (uint32_t i = d - 1; i >= base + STEP; i--, line += STEP) {
                vf error[GROUPS];
                LANES_UNROLL
                for (uint32_t g = 0; g < GROUPS; g++)
                    error[g] = vf_load(x + (size_t)i * ROWS + (size_t)g * LANES);
                LANES_UNROLL
                for (uint32_t j = 0; j < STEP; j++)
                    LANES_UNROLL
                for (uint32_t g = 0; g < GROUPS; g++)
                    t[j][g] = vf_fnma(vf_set(line[j]), error[g], t[j][g]);
            }
            vi partial[GROUPS];
            LANES_UNROLL
            for (uint32_t g = 0; g < GROUPS; g++)
                partial[g] = vi_set(0);
            LANES_UNROLL
            for (uint32_t down = 0; down < STEP; down++) {
                const uint32_t i = STEP - 1 - down;
                LANES_UNROLL
                for (uint32_t g = 0; g < GROUPS; g++) {
                    float *at = x + (size_t)(base + i) * ROWS + (size_t)g * LANES;
                    vf code = feedback_code(t[i][g], scale[g], zero[g]);
                    vf error = vf_fma(code - zero[g], scale[g], -vf_load(at));
                    vf_store(at, error);
                    partial[g] |= vf_truncate(code) << (int)(8 * i);
                    LANES_UNROLL
                    for (uint32_t j = 0; j < i; j++)
                        t[j][g] = vf_fnma(vf_set(line[j]), error, t[j][g]);
                }
                line += STEP;
            }
            uint32_t quad = base / STEP; /* 4 * (wide * f + w) + t */
            uint32_t f = quad / (4 * wide);
            uint32_t *word = scratch->k_words + (size_t)(quad % (4 * wide)) * ROWS + row;
            for (uint32_t g = 0; g < GROUPS; g++) {
                vi others = f == 3 ? vi_set(0) : vi_load(word + (size_t)g * LANES);
                vi_store(word + (size_t)g * LANES, others | partial[g] << (int)(2 * f));
            }
        }
    }
}

/* From words by row to the page's order, [tile][g][t][row g, row g + 8][w]. */
LANES_INLINE void write_k(const uint32_t *words, const uint32_t wide, uint8_t *record) {
    for (uint32_t line = 0; line < ROWS / 2; line++) /* 8 * tile + g */
        for (uint32_t t = 0; t < 4; t++) {
            uint32_t out[2 * MAX_WIDE];
            LANES_UNROLL
            for (uint32_t half = 0; half < 2; half++)
                LANES_UNROLL
            for (uint32_t w = 0; w < wide; w++)
                out[half * wide + w] = words[(size_t)(4 * w + t) * ROWS + line / 8 * 16 + half * 8 + line % 8];
            memcpy(record + (size_t)(line * 4 + t) * 8 * wide, out, (size_t)8 * wide);
        }
}

/* Two neighbouring rows' halves are one word: [tile][g][t][tokens 0..7, 8..15][r]. */
LANES_INLINE void write_v(const uint16_t *halves, const uint32_t wide, uint8_t *record) {
    for (uint32_t line = 0; line < ROWS / 2; line++)
        for (uint32_t t = 0; t < 4; t++) {
            uint32_t out[2 * MAX_WIDE];
            LANES_UNROLL
            for (uint32_t half = 0; half < 2; half++)
                LANES_UNROLL
            for (uint32_t r = 0; r < wide; r++)
                memcpy(&out[half * wide + r],
                       halves + (size_t)(8 * r + line % 8) * ROWS + line / 8 * 16 + half * 8 + 2 * t, sizeof(out[0]));
            memcpy(record + (size_t)(line * 4 + t) * 8 * wide, out, (size_t)8 * wide);
        }
}

static void write_scales(const struct host_pack_scratch *scratch, uint8_t *scales) {
    for (uint32_t row = 0; row < ROWS; row++) {
        uint16_t four[4] = {scratch->scale[0][row], scratch->zero[0][row], scratch->scale[1][row],
                            scratch->zero[1][row]};
        memcpy(scales + oscar_packed_scale_offset(row), four, sizeof(four));
    }
}

/* `wide` is a constant in each of the copies that level_pack() makes. */
LANES_INLINE bool pack_k(struct host_pack_scratch *scratch, const uint16_t *rows, uint64_t position,
                         const uint32_t wide, uint8_t *record) {
    const struct oscar_head_calibration *head = scratch->head;
    load_pairs(rows, 64 * wide, scratch->pairs);
    if (head->centre_static)
        take_out_centre(scratch, position);
    else if (head->feedback)
        expand_pairs(scratch, 64 * wide);
    if (!find_scales(scratch, head->centre_static ? scratch->x : NULL, 64 * wide, head->rank_k, 0))
        return false;
    if (head->feedback)
        code_k_feedback(scratch, 64 * wide);
    else if (head->centre_static)
        code_k_nearest(scratch, scratch->x, wide);
    else
        code_k_nearest(scratch, NULL, wide);
    write_k(scratch->k_words, wide, record);
    return true;
}

LANES_INLINE bool pack_v(struct host_pack_scratch *scratch, const uint16_t *rows, const uint32_t wide,
                         uint8_t *record) {
    load_pairs(rows, 64 * wide, scratch->pairs);
    if (!find_scales(scratch, NULL, 64 * wide, scratch->head->rank_v, 1))
        return false;
    code_v(scratch, wide);
    write_v(scratch->v_halves, wide, record);
    return true;
}

LANES_INLINE bool pack(struct host_pack_scratch *scratch, const uint8_t *dense, uint64_t position, const uint32_t wide,
                       uint8_t *packed) {
    const uint16_t *rows = (const uint16_t *)dense;
    if (!pack_k(scratch, rows, position, wide, packed) ||
        !pack_v(scratch, rows + (size_t)ROWS * 64 * wide, wide, packed + oscar_packed_v_offset(64 * wide)))
        return false;
    write_scales(scratch, packed + oscar_packed_scales_offset(64 * wide));
    return true;
}

bool HOST_NAME(level_pack)(struct host_pack_scratch *scratch, const uint8_t *dense_record, uint64_t position,
                           uint8_t *packed_record) {
    switch (scratch->calibration->head_dim) {
    case 64:
        return pack(scratch, dense_record, position, 1, packed_record);
    case 128:
        return pack(scratch, dense_record, position, 2, packed_record);
    default:
        return pack(scratch, dense_record, position, 4, packed_record);
    }
}
