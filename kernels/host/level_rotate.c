/* SPDX-License-Identifier: Apache-2.0 */
/* Built once a level: rotation of rows, in the orders that kernels/rotate.h fixes. */
#include "kernels/host/level_functions.h"

#define MAX_DIM 256U
#define SUM_LANES 16 /* partial sums of the way back: rotate.h's 16, whatever the width of a register */
#define SUM_PARTS (SUM_LANES / LANES)

/* ROWS rows by COLUMNS registers of columns, kept in registers over the whole sum. */
LANES_INLINE void forward_block(const float *matrix, uint32_t d, const float *x, size_t x_stride, float *y,
                                size_t y_stride, const uint32_t rows, const uint32_t columns) {
    vf sum[4][8];
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < columns; c++)
            sum[r][c] = vf_set(0.0F);
    for (uint32_t i = 0; i < d; i++) {
        vf factor[8];
        for (uint32_t c = 0; c < columns; c++)
            factor[c] = vf_load(matrix + (size_t)i * d + (size_t)c * LANES);
        for (uint32_t r = 0; r < rows; r++) {
            vf element = vf_set(x[r * x_stride + i]);
            for (uint32_t c = 0; c < columns; c++)
                sum[r][c] = vf_fma(element, factor[c], sum[r][c]);
        }
    }
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < columns; c++)
            vf_store(y + r * y_stride + (size_t)c * LANES, sum[r][c]);
}

/* Registers of sums: 16 with AVX-512's 32 registers, 8 with 16. */
#if HOST_LEVEL == 2
#define FORWARD_COLUMNS 4U
#else
#define FORWARD_COLUMNS 2U
#endif
#define FORWARD_ROWS 4U
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

static void forward_matrix(const float *matrix, uint32_t d, uint32_t rows, const float *x, float *y, size_t y_stride) {
    for (; rows >= FORWARD_ROWS; rows -= FORWARD_ROWS, x += FORWARD_ROWS * MAX_DIM, y += FORWARD_ROWS * y_stride)
        for (uint32_t c = 0; c < d; c += FORWARD_COLUMNS * LANES)
            forward_block(matrix + c, d, x, MAX_DIM, y + c, y_stride, FORWARD_ROWS, FORWARD_COLUMNS);
    for (; rows > 0; rows--, x += MAX_DIM, y += y_stride)
        for (uint32_t c = 0; c < d; c += 4U * LANES)
            forward_block(matrix + c, d, x, MAX_DIM, y + c, y_stride, 1, 4);
}

#if LANES == 16

/* a_l += a_(l+8) of two vectors of 16 partial sums at once, then of two such pairs l+4, and so on. */
LANES_INLINE vf fold_8(vf a, vf b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
LANES_INLINE vf fold_4(vf a, vf b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
LANES_INLINE vf fold_2(vf a, vf b) {
    return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
LANES_INLINE vf fold_1(vf a, vf b) {
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
LANES_INLINE vf fold(const vf a[LANES][SUM_PARTS]) {
    vf eight[8];
    vf four[4];
    for (int i = 0; i < 8; i++)
        eight[i] = fold_8(a[2 * i][0], a[2 * i + 1][0]);
    for (int i = 0; i < 4; i++)
        four[i] = fold_4(eight[2 * i], eight[2 * i + 1]);
    return fold_1(fold_2(four[0], four[1]), fold_2(four[2], four[3]));
}
#elif LANES == 8

LANES_INLINE vf fold_4(vf a, vf b) {
    return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
LANES_INLINE vf fold_2(vf a, vf b) {
    return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
}
LANES_INLINE vf fold_1(vf a, vf b) {
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
LANES_INLINE vf fold(const vf a[LANES][SUM_PARTS]) {
    vf four[4];
    for (int i = 0; i < 4; i++)
        four[i] = fold_4(a[2 * i][0] + a[2 * i][1], a[2 * i + 1][0] + a[2 * i + 1][1]);
    return fold_1(fold_2(four[0], four[1]), fold_2(four[2], four[3]));
}
#else

LANES_INLINE vf fold_2(vf a, vf b) { return SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7); }
LANES_INLINE vf fold_1(vf a, vf b) { return SHUFFLE(a, b, 0, 2, 4, 6) + SHUFFLE(a, b, 1, 3, 5, 7); }
LANES_INLINE vf fold(const vf a[LANES][SUM_PARTS]) {
    vf four[4];
    for (int i = 0; i < 4; i++)
        four[i] = (a[i][0] + a[i][2]) + (a[i][1] + a[i][3]);
    return fold_1(fold_2(four[0], four[1]), fold_2(four[2], four[3]));
}
#endif

static void back_matrix(const float *matrix, uint32_t d, const float *x, float *y) {
    for (uint32_t i = 0; i < d; i += LANES) {
        vf sum[LANES][SUM_PARTS];
        for (uint32_t n = 0; n < LANES; n++)
            for (uint32_t part = 0; part < SUM_PARTS; part++) {
                const float *row = matrix + (size_t)(i + n) * d + (size_t)part * LANES;
                vf partial = vf_set(0.0F);
                for (uint32_t j = 0; j < d; j += SUM_LANES)
                    partial = vf_fma(vf_load(x + (size_t)part * LANES + j), vf_load(row + j), partial);
                sum[n][part] = partial;
            }
        vf_store(y + i, fold(sum));
    }
}

/* One stage within a register: element e meets e ^ h, the upper one of the two is subtracted. */
#if LANES == 16
#define MEET_1(v) SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define MEET_2(v) SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define MEET_4(v) SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define MEET_8(v) SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define LANE_NUMBERS                                                                                                   \
    (vi) { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 }
#elif LANES == 8
#define MEET_1(v) SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6)
#define MEET_2(v) SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5)
#define MEET_4(v) SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3)
#define LANE_NUMBERS                                                                                                   \
    (vi) { 0, 1, 2, 3, 4, 5, 6, 7 }
#else
#define MEET_1(v) SHUFFLE(v, v, 1, 0, 3, 2)
#define MEET_2(v) SHUFFLE(v, v, 2, 3, 0, 1)
#define LANE_NUMBERS                                                                                                   \
    (vi) { 0, 1, 2, 3 }
#endif

LANES_INLINE vf butterfly(vf value, vf met, int h) {
    vi upper = (LANE_NUMBERS & h) == vi_set(h);
    return met + vf_from_bits(vf_bits(value) ^ (upper & INT32_MIN));
}

LANES_INLINE void hadamard_row(const float *x, float *y, const uint32_t registers, float factor) {
    vf v[MAX_DIM / LANES];
    LANES_UNROLL
    for (uint32_t r = 0; r < registers; r++) {
        vf value = vf_load(x + (size_t)r * LANES);
        value = butterfly(value, MEET_1(value), 1);
        value = butterfly(value, MEET_2(value), 2);
#if LANES > 4
        value = butterfly(value, MEET_4(value), 4);
#endif
#if LANES > 8
        value = butterfly(value, MEET_8(value), 8);
#endif
        v[r] = value;
    }
    LANES_UNROLL
    for (uint32_t h = 1; h < registers; h *= 2)
        LANES_UNROLL
    for (uint32_t r = 0; r < registers; r++)
        if ((r & h) == 0) {
            vf a = v[r];
            vf b = v[r + h];
            v[r] = a + b;
            v[r + h] = a - b;
        }
    LANES_UNROLL
    for (uint32_t r = 0; r < registers; r++)
        vf_store(y + (size_t)r * LANES, v[r] * factor);
}

static void hadamard(uint32_t d, uint32_t rows, const float *x, size_t x_stride, float *y, size_t y_stride) {
    float factor = (float)(1.0 / sqrt((double)d));
    for (uint32_t r = 0; r < rows; r++, x += x_stride, y += y_stride) {
        if (d == 64)
            hadamard_row(x, y, 64 / LANES, factor);
        else if (d == 128)
            hadamard_row(x, y, 128 / LANES, factor);
        else
            hadamard_row(x, y, 256 / LANES, factor);
    }
}

void HOST_NAME(level_rotate)(const float *matrix, uint32_t d, bool back, uint32_t rows, const float *x, size_t x_stride,
                             float *y, size_t y_stride) {
    if (!matrix) {
        hadamard(d, rows, x, x_stride, y, y_stride);
        return;
    }
    /* Through a copy, so that y may be x. */
    float copy[FORWARD_ROWS * MAX_DIM] __attribute__((aligned(64)));
    for (uint32_t done = 0; done < rows; done += FORWARD_ROWS) {
        uint32_t count = rows - done < FORWARD_ROWS ? rows - done : FORWARD_ROWS;
        for (uint32_t r = 0; r < count; r++)
            memcpy(copy + (size_t)r * MAX_DIM, x + (done + r) * x_stride, d * sizeof(float));
        if (!back)
            forward_matrix(matrix, d, count, copy, y + done * y_stride, y_stride);
        else
            for (uint32_t r = 0; r < count; r++)
                back_matrix(matrix, d, copy + (size_t)r * MAX_DIM, y + (done + r) * y_stride);
    }
}
