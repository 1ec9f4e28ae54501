/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Built once a level: one dense record to one packed record. The 64 rows of a page lie across the lanes (x[dim][row]), so
 * that no step works across a register: the clip rank, the feedback's order of terms and both byte orders of the page are
 * plain element-wise code, and each row sees exactly the operations of the oracle (kernels/codec.c).
 */
#include "kernels/host/level_functions.h"

#define ROWS OSCAR_PAGE_TOKENS
#define MAX_DIM 256U
#define MAX_WIDE (MAX_DIM / 64U)
#define STEP 4U /* dims that are coded together: the four bytes of a K word */

/* Registers of rows that one pass of the feedback or the centre carries for its STEP dims. */
#if HOST_LEVEL == 2
#define GROUPS 4U
#else
#define GROUPS 2U
#endif

struct host_pack_scratch {
    float x[MAX_DIM * ROWS];               /* the rows; with feedback, the errors from the top down */
    float row_cos[OSCAR_MAX_PAIRS * ROWS]; /* of the head's pairs, by row: T, then joined with a page's E below */
    float row_sin[OSCAR_MAX_PAIRS * ROWS];
    float angle_cos[OSCAR_MAX_PAIRS * ROWS];
    float angle_sin[OSCAR_MAX_PAIRS * ROWS];
    uint32_t k_words[4U * MAX_WIDE * ROWS];  /* [w][t][row] */
    uint16_t v_halves[8U * MAX_WIDE * ROWS]; /* [r][g][row] */
    uint16_t scale[2][ROWS], zero[2][ROWS];  /* of K and V */
    const struct oscar_calibration *calibration;
    const struct oscar_head_calibration *head;
};

size_t HOST_NAME(level_pack_scratch_bytes)(void) { return sizeof(struct host_pack_scratch); }

void HOST_NAME(level_pack_begin)(struct host_pack_scratch *scratch, const struct oscar_calibration *calibration,
                                 const struct oscar_head_calibration *head) {
    scratch->calibration = calibration;
    scratch->head = head;
    const struct oscar_turns *turns = &calibration->turns;
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t i = 0; i < head->pairs; i++) {
            const float *t = turns->row_turn + ((size_t)row * turns->frequencies + (size_t)head->centre_pair[i]) * 2;
            scratch->row_cos[i * ROWS + row] = t[0];
            scratch->row_sin[i * ROWS + row] = t[1];
        }
}

#if HOST_LEVEL > 0

/* A 16 by 8 block: 8 rows of 16 BF16, transposed as 8 by 8 pairs, then each pair is taken apart. */
static void load_rows(const uint16_t *from, uint32_t d, float *x) {
    for (uint32_t row = 0; row < ROWS; row += 8)
        for (uint32_t dim = 0; dim < d; dim += 16) {
            __m256i line[8];
            __m256i quad[8];
            for (uint32_t r = 0; r < 8; r++)
                line[r] = _mm256_loadu_si256((const __m256i *)(from + (size_t)(row + r) * d + dim));
            for (uint32_t r = 0; r < 8; r += 4) {
                __m256i low_01 = _mm256_unpacklo_epi32(line[r], line[r + 1]);
                __m256i high_01 = _mm256_unpackhi_epi32(line[r], line[r + 1]);
                __m256i low_23 = _mm256_unpacklo_epi32(line[r + 2], line[r + 3]);
                __m256i high_23 = _mm256_unpackhi_epi32(line[r + 2], line[r + 3]);
                quad[r] = _mm256_unpacklo_epi64(low_01, low_23);
                quad[r + 1] = _mm256_unpackhi_epi64(low_01, low_23);
                quad[r + 2] = _mm256_unpacklo_epi64(high_01, high_23);
                quad[r + 3] = _mm256_unpackhi_epi64(high_01, high_23);
            }
            for (uint32_t pair = 0; pair < 8; pair++) {
                __m256i rows = pair < 4 ? _mm256_permute2x128_si256(quad[pair], quad[pair + 4], 0x20)
                                        : _mm256_permute2x128_si256(quad[pair - 4], quad[pair], 0x31);
                float *to = x + (size_t)(dim + 2 * pair) * ROWS + row;
                _mm256_storeu_si256((__m256i *)to, _mm256_slli_epi32(rows, 16));
                _mm256_storeu_si256((__m256i *)(to + ROWS), _mm256_and_si256(rows, _mm256_set1_epi32(-65536)));
            }
        }
}

#else

static void load_rows(const uint16_t *from, uint32_t d, float *x) {
    for (uint32_t dim = 0; dim < d; dim++)
        for (uint32_t row = 0; row < ROWS; row++)
            x[(size_t)dim * ROWS + row] = oscar_bf16_to_float(from[(size_t)row * d + dim]);
}

#endif

/* x -= c'(position), in the order of oscar_codec_centre(). */
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
            for (uint32_t j = 0; j < STEP; j++)
                for (uint32_t g = 0; g < GROUPS; g++)
                    centre[j][g] = vf_set(head->centre_static[dim + j]);
            for (uint32_t i = 0; i < head->pairs; i++) {
                const float *a = head->centre_cos + (size_t)i * d + dim;
                const float *b = head->centre_sin + (size_t)i * d + dim;
                for (uint32_t g = 0; g < GROUPS; g++) {
                    vf cos_angle = vf_load(scratch->angle_cos + (size_t)i * ROWS + row + (size_t)g * LANES);
                    for (uint32_t j = 0; j < STEP; j++)
                        centre[j][g] = vf_fma(cos_angle, vf_set(a[j]), centre[j][g]);
                }
                for (uint32_t g = 0; g < GROUPS; g++) {
                    vf sin_angle = vf_load(scratch->angle_sin + (size_t)i * ROWS + row + (size_t)g * LANES);
                    for (uint32_t j = 0; j < STEP; j++)
                        centre[j][g] = vf_fma(sin_angle, vf_set(b[j]), centre[j][g]);
                }
            }
            for (uint32_t j = 0; j < STEP; j++)
                for (uint32_t g = 0; g < GROUPS; g++) {
                    float *at = scratch->x + (size_t)(dim + j) * ROWS + row + (size_t)g * LANES;
                    vf_store(at, vf_load(at) - centre[j][g]);
                }
        }
}

struct extremes {
    vf low, high; /* least and greatest element */
    vi threshold; /* magnitude bits of the element of the clip rank */
    vi greatest;  /* magnitude bits of the largest element: NaN > Inf > every number */
};

/* Keeps the `count` largest magnitudes in order while it passes over the row once. */
LANES_INLINE struct extremes find_few(const float *x, uint32_t d, uint32_t wanted, const uint32_t count) {
    vi top[16];
    for (uint32_t m = 0; m < count; m++)
        top[m] = vi_set(-1);
    struct extremes found = {.low = vf_load(x), .high = vf_load(x)};
    for (uint32_t j = 0; j < d; j++) {
        vf value = vf_load(x + (size_t)j * ROWS);
        found.low = vf_min(found.low, value);
        found.high = vf_max(found.high, value);
        vi magnitude = vf_bits(value) & INT32_MAX;
        for (uint32_t m = 0; m < count; m++) {
            vi larger = vi_max(top[m], magnitude);
            magnitude = vi_min(top[m], magnitude);
            top[m] = larger;
        }
    }
    found.greatest = top[0];
    found.threshold = top[0];
    for (uint32_t m = 1; m < count; m++)
        found.threshold = m < wanted ? top[m] : found.threshold;
    return found;
}

/* Any rank: the greatest bit pattern that at least `wanted` magnitudes reach, bit by bit from the top. */
static struct extremes find_many(const float *x, uint32_t d, uint32_t wanted) {
    struct extremes found = find_few(x, d, 1, 1);
    vi prefix = vi_set(0);
    for (int bit = 30; bit >= 0; bit--) {
        vi candidate = prefix | vi_set((int32_t)1 << bit);
        vi reached = vi_set(0);
        for (uint32_t j = 0; j < d; j++)
            reached = vi_count_ge(reached, vi_load(x + (size_t)j * ROWS) & INT32_MAX, candidate);
        vi enough = reached >= vi_set((int32_t)wanted);
        prefix = (candidate & enough) | (prefix & ~enough);
    }
    found.threshold = prefix;
    return found;
}

static struct extremes find_extremes(const float *x, uint32_t d, uint32_t rank) {
    uint32_t wanted = d - rank; /* the threshold is the wanted-th largest */
    if (wanted <= 3)
        return find_few(x, d, wanted, 3);
    if (wanted <= 6)
        return find_few(x, d, wanted, 6);
    if (wanted <= 8)
        return find_few(x, d, wanted, 8);
    if (wanted <= 11)
        return find_few(x, d, wanted, 11);
    if (wanted <= 16)
        return find_few(x, d, wanted, 16);
    return find_many(x, d, wanted);
}

/* Scale and zero of every row. False when a row holds NaN or Inf, or a scale overflows binary16. */
static bool find_scales(const float *x, uint32_t d, uint32_t rank, uint16_t *scale, uint16_t *zero) {
    vi greatest = vi_set(0);
    vi greatest_scale = vi_set(0);
    for (uint32_t row = 0; row < ROWS; row += LANES) {
        struct extremes found = find_extremes(x + row, d, rank);
        vf threshold = vf_from_bits(found.threshold);
        vf low = vf_max(found.low, -threshold) + 0.0F; /* + 0: a minimum of -0 counts as +0, as in the oracle */
        vf high = vf_min(found.high, threshold);
        vf step = (high - low) / 3.0F;
        step = vf_max(step, threshold * 0x1p-10F);
        step = vf_max(step, vf_set(0x1p-24F));
        vf_to_fp16(step, scale + row);
        vf_to_fp16(-low / vf_from_fp16(scale + row), zero + row);
        greatest = vi_max(greatest, found.greatest);
        greatest_scale = vi_max(greatest_scale, vi_load_u16(scale + row));
    }
    return vi_reduce_max(greatest) < 0x7F800000 && vi_reduce_max(greatest_scale) < 0x7C00;
}

/* The clamp comes before the conversion: floor(v) clamped to 0..3 is v clamped to 0..3 and truncated. */
LANES_INLINE vi code_of(vf value, vf scale, vf zero) {
    vf code = value / scale + zero + 0.5F;
    return vf_truncate(vf_min(vf_max(code, vf_set(0.0F)), vf_set(3.0F)));
}

static void code_k_nearest(struct host_pack_scratch *scratch, uint32_t d) {
    const uint32_t wide = d / 64;
    for (uint32_t row = 0; row < ROWS; row += LANES) {
        vf scale = vf_from_fp16(scratch->scale[0] + row);
        vf zero = vf_from_fp16(scratch->zero[0] + row);
        for (uint32_t w = 0; w < wide; w++)
            for (uint32_t t = 0; t < 4; t++) {
                vi word = vi_set(0);
                for (uint32_t f = 0; f < 4; f++)
                    for (uint32_t k = 0; k < 4; k++) {
                        uint32_t dim = 16 * (wide * f + w) + 4 * t + k;
                        vf value = vf_load(scratch->x + (size_t)dim * ROWS + row);
                        word |= code_of(value, scale, zero) << (int)(8 * k + 2 * f);
                    }
                vi_store(scratch->k_words + (size_t)(4 * w + t) * ROWS + row, word);
            }
    }
}

/*
 * Feedback rounding, STEP dims at a time from the top. The errors of all higher dims lie in x already; each dim takes their
 * terms in descending order, then those of the step itself, which is the order of the oracle.
 */
static void code_k_feedback(struct host_pack_scratch *scratch, uint32_t d, const float *feedback) {
    const uint32_t wide = d / 64;
    for (uint32_t row = 0; row < ROWS; row += GROUPS * LANES) {
        float *x = scratch->x + row;
        vf scale[GROUPS];
        vf zero[GROUPS];
        for (uint32_t g = 0; g < GROUPS; g++) {
            scale[g] = vf_from_fp16(scratch->scale[0] + row + (size_t)g * LANES);
            zero[g] = vf_from_fp16(scratch->zero[0] + row + (size_t)g * LANES);
        }
        for (uint32_t base = d; base > 0;) {
            base -= STEP;
            vf t[STEP][GROUPS];
            for (uint32_t j = 0; j < STEP; j++)
                for (uint32_t g = 0; g < GROUPS; g++)
                    t[j][g] = vf_load(x + (size_t)(base + j) * ROWS + (size_t)g * LANES);
            for (uint32_t i = d - 1; i >= base + STEP; i--) {
                const float *line = feedback + (size_t)i * d + base;
                vf error[GROUPS];
                for (uint32_t g = 0; g < GROUPS; g++)
                    error[g] = vf_load(x + (size_t)i * ROWS + (size_t)g * LANES);
                for (uint32_t j = 0; j < STEP; j++)
                    for (uint32_t g = 0; g < GROUPS; g++)
                        t[j][g] = vf_fnma(vf_set(line[j]), error[g], t[j][g]);
            }
            vi partial[GROUPS];
            for (uint32_t g = 0; g < GROUPS; g++)
                partial[g] = vi_set(0);
            for (uint32_t i = STEP; i-- > 0;) {
                const float *line = feedback + (size_t)(base + i) * d + base;
                for (uint32_t g = 0; g < GROUPS; g++) {
                    float *at = x + (size_t)(base + i) * ROWS + (size_t)g * LANES;
                    vi code = code_of(t[i][g], scale[g], zero[g]);
                    vf error = vf_fma(vf_from_int(code) - zero[g], scale[g], -vf_load(at));
                    vf_store(at, error);
                    partial[g] |= code << (int)(8 * i);
                    for (uint32_t j = 0; j < i; j++)
                        t[j][g] = vf_fnma(vf_set(line[j]), error, t[j][g]);
                }
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

static void code_v(struct host_pack_scratch *scratch, uint32_t d) {
    const uint32_t wide = d / 64;
    for (uint32_t row = 0; row < ROWS; row += LANES) {
        vf scale = vf_from_fp16(scratch->scale[1] + row);
        vf zero = vf_from_fp16(scratch->zero[1] + row);
        for (uint32_t r = 0; r < wide; r++)
            for (uint32_t g = 0; g < 8; g++) {
                vi half = vi_set(0);
                for (uint32_t i = 0; i < 8; i++) {
                    vf value = vf_load(scratch->x + (size_t)(8 * (wide * i + r) + g) * ROWS + row);
                    half |= code_of(value, scale, zero) << (int)(2 * i);
                }
                vi_store_u16(scratch->v_halves + (size_t)(8 * r + g) * ROWS + row, half);
            }
    }
}

/* From words by row to the page's order, [tile][g][t][row g, row g + 8][w]. */
static void write_k(const uint32_t *words, uint32_t wide, uint8_t *record) {
    for (uint32_t line = 0; line < OSCAR_PAGE_TOKENS / 2; line++) /* 8 * tile + g */
        for (uint32_t t = 0; t < 4; t++) {
            uint32_t out[2 * MAX_WIDE];
            for (uint32_t half = 0; half < 2; half++)
                for (uint32_t w = 0; w < wide; w++)
                    out[half * wide + w] = words[(size_t)(4 * w + t) * ROWS + line / 8 * 16 + half * 8 + line % 8];
            memcpy(record + (size_t)(line * 4 + t) * 8 * wide, out, (size_t)8 * wide);
        }
}

/* Two neighbouring rows' halves are one word: [tile][g][t][tokens 0..7, 8..15][r]. */
static void write_v(const uint16_t *halves, uint32_t wide, uint8_t *record) {
    for (uint32_t line = 0; line < OSCAR_PAGE_TOKENS / 2; line++)
        for (uint32_t t = 0; t < 4; t++) {
            uint32_t out[2 * MAX_WIDE];
            for (uint32_t half = 0; half < 2; half++)
                for (uint32_t r = 0; r < wide; r++)
                    memcpy(&out[half * wide + r],
                           halves + (size_t)(8 * r + line % 8) * ROWS + line / 8 * 16 + half * 8 + 2 * t,
                           sizeof(out[0]));
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

bool HOST_NAME(level_pack)(struct host_pack_scratch *scratch, const uint8_t *dense_record, uint64_t position,
                           uint8_t *packed_record) {
    const struct oscar_head_calibration *head = scratch->head;
    const uint32_t d = scratch->calibration->head_dim;
    const uint16_t *k = (const uint16_t *)dense_record;
    load_rows(k, d, scratch->x);
    if (head->centre_static)
        take_out_centre(scratch, position);
    if (!find_scales(scratch->x, d, head->rank_k, scratch->scale[0], scratch->zero[0]))
        return false;
    if (head->feedback)
        code_k_feedback(scratch, d, head->feedback);
    else
        code_k_nearest(scratch, d);
    write_k(scratch->k_words, d / 64, packed_record);

    load_rows(k + (size_t)ROWS * d, d, scratch->x);
    if (!find_scales(scratch->x, d, head->rank_v, scratch->scale[1], scratch->zero[1]))
        return false;
    code_v(scratch, d);
    write_v(scratch->v_halves, d / 64, packed_record + oscar_packed_v_offset(d));
    write_scales(scratch, packed_record + oscar_packed_scales_offset(d));
    return true;
}
