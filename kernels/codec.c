/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/codec.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "kernels/number.h"
#include "proto/page.h"

#define CODEC_MAX_DIM 256U

void oscar_codec_centre(const struct oscar_calibration *calibration, const struct oscar_head_calibration *head,
                        uint64_t position, float *ret_centre) {
    uint32_t d = calibration->head_dim;
    for (uint32_t j = 0; j < d; j++)
        ret_centre[j] = head->centre_static ? head->centre_static[j] : 0.0F;
    uint64_t page = position / OSCAR_PAGE_TOKENS;
    uint64_t row = position % OSCAR_PAGE_TOKENS;
    const struct oscar_turns *turns = &calibration->turns;
    for (uint32_t i = 0; i < head->pairs; i++) {
        size_t frequency = (size_t)head->centre_pair[i];
        const float *e = turns->page_turn + (page * turns->frequencies + frequency) * 2;
        const float *t = turns->row_turn + (row * turns->frequencies + frequency) * 2;
        /* The second product is rounded by itself: which one goes into the fma shows in the bytes. */
        float cos_angle = fmaf(e[0], t[0], -(e[1] * t[1]));
        float sin_angle = fmaf(e[1], t[0], e[0] * t[1]);
        const float *a = head->centre_cos + (size_t)i * d;
        const float *b = head->centre_sin + (size_t)i * d;
        for (uint32_t j = 0; j < d; j++)
            ret_centre[j] = fmaf(sin_angle, b[j], fmaf(cos_angle, a[j], ret_centre[j]));
    }
}

static int compare_floats(const void *left, const void *right) {
    float a = *(const float *)left;
    float b = *(const float *)right;
    return (a > b) - (a < b);
}

/* False when a value is NaN or Inf, or the scale is too large for binary16. */
static bool codec_scale(const float *x, uint32_t d, uint32_t rank, struct oscar_row_scale *ret) {
    float magnitude[CODEC_MAX_DIM];
    float low = x[0];
    float high = x[0];
    for (uint32_t j = 0; j < d; j++) {
        if (!isfinite(x[j]))
            return false;
        magnitude[j] = fabsf(x[j]);
        low = x[j] < low ? x[j] : low;
        high = x[j] > high ? x[j] : high;
    }
    qsort(magnitude, d, sizeof(magnitude[0]), compare_floats);
    float threshold = magnitude[rank];
    /* The clipped row's minimum and maximum; its largest magnitude is the threshold itself. A minimum of zero may be -0 or +0
     * by the order in which it was found: adding +0 makes it +0, so that the zero's sign bit (of -low) is always the same. */
    low = (low > -threshold ? low : -threshold) + 0.0F;
    high = high < threshold ? high : threshold;
    float step = (high - low) / 3.0F;
    step = fmaxf(step, threshold * 0x1p-10F);
    step = fmaxf(step, 0x1p-24F);
    uint16_t scale = oscar_fp16_from_float(step);
    if (scale >= 0x7C00U)
        return false;
    ret->scale = scale;
    ret->zero = oscar_fp16_from_float(-low / oscar_fp16_to_float(scale));
    return true;
}

/* A feedback matrix without bounds can drive a value to NaN: that counts as 0. */
static float codec_round(float value, float scale, float zero) {
    float code = floorf(value / scale + zero + 0.5F);
    if (!(code > 0.0F))
        return 0.0F;
    return code < 3.0F ? code : 3.0F;
}

int oscar_codec_row(const float *x, uint32_t d, uint32_t rank, const float *feedback, struct oscar_row_scale *ret_scale,
                    uint8_t *ret_codes) {
    struct oscar_row_scale row;
    if (!codec_scale(x, d, rank, &row))
        return OSCAR_ERR_NOT_FINITE;
    float scale = oscar_fp16_to_float(row.scale);
    float zero = oscar_fp16_to_float(row.zero);
    *ret_scale = row;
    if (!feedback) {
        for (uint32_t j = 0; j < d; j++)
            ret_codes[j] = (uint8_t)codec_round(x[j], scale, zero);
        return 0;
    }
    float t[CODEC_MAX_DIM];
    for (uint32_t j = 0; j < d; j++)
        t[j] = x[j];
    for (uint32_t i = d; i-- > 0;) {
        float code = codec_round(t[i], scale, zero);
        float error = fmaf(code - zero, scale, -x[i]);
        ret_codes[i] = (uint8_t)code;
        for (uint32_t j = 0; j < i; j++)
            t[j] = fmaf(-feedback[(size_t)i * d + j], error, t[j]);
    }
    return 0;
}
