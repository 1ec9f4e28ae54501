/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/reference.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/codec.h"
#include "kernels/number.h"
#include "proto/cleanup.h"
#include "proto/page.h"

#define MAX_DIM 256U

static double worker_element(const struct oscar_geometry *geometry, const void *data, int64_t index) {
    uint16_t bits = ((const uint16_t *)data)[index];
    return geometry->dtype == OSCAR_BF16 ? oscar_bf16_to_float(bits) : oscar_fp16_to_float(bits);
}

/* Element (i, j) of R; the normalised Sylvester Hadamard matrix when there is none. */
static double rotation_element(const float *matrix, uint32_t d, uint32_t i, uint32_t j) {
    if (matrix)
        return matrix[(size_t)i * d + j];
    return (__builtin_popcount(i & j) % 2 ? -1.0 : 1.0) / sqrt((double)d);
}

static void rotate(const float *matrix, uint32_t d, bool back, const double *x, double *y) {
    for (uint32_t j = 0; j < d; j++) {
        double sum = 0.0;
        for (uint32_t i = 0; i < d; i++)
            sum += x[i] * (back ? rotation_element(matrix, d, j, i) : rotation_element(matrix, d, i, j));
        y[j] = sum;
    }
}

static size_t dense_row(const struct oscar_geometry *geometry, uint32_t layer, uint32_t head, bool is_v, uint32_t row) {
    size_t record = ((size_t)layer * geometry->kv_heads + head) * oscar_dense_record_bytes(geometry->head_dim);
    return record + ((is_v ? OSCAR_PAGE_TOKENS : 0) + (size_t)row) * geometry->head_dim * sizeof(uint16_t);
}

int oscar_reference_store(const struct oscar_store_args *args) {
    const struct oscar_geometry *geometry = args->geometry;
    uint32_t d = geometry->head_dim;
    int result = 0;
    for (uint32_t token = 0; token < args->tokens; token++) {
        uint8_t *page = args->pages[(args->first_row + token) / OSCAR_PAGE_TOKENS];
        uint32_t row = (args->first_row + token) % OSCAR_PAGE_TOKENS;
        for (uint32_t side_head = 0; side_head < 2 * geometry->kv_heads; side_head++) {
            bool is_v = side_head % 2 != 0;
            uint32_t head = side_head / 2;
            const struct oscar_head_calibration *calibration =
                oscar_calibration_head(args->calibration, args->layer, head);
            const struct oscar_rows *from = is_v ? &args->v : &args->k;
            double x[MAX_DIM];
            double y[MAX_DIM];
            for (uint32_t j = 0; j < d; j++)
                x[j] = worker_element(geometry, from->data, token * from->token_stride + head * from->head_stride + j);
            rotate(is_v ? calibration->rotation_v : calibration->rotation_k, d, false, x, y);
            uint16_t *to = (uint16_t *)(page + dense_row(geometry, args->layer, head, is_v, row));
            for (uint32_t j = 0; j < d; j++) {
                to[j] = oscar_bf16_from_float((float)y[j]);
                if (!(fabsf(oscar_bf16_to_float(to[j])) <= OSCAR_MAX_ROW_MAGNITUDE))
                    result = OSCAR_ERR_NOT_FINITE;
            }
        }
    }
    return result;
}

/* One side of one record. */
static int pack_side(const struct oscar_calibration *calibration, const struct oscar_head_calibration *head,
                     uint64_t position, bool is_v, const uint8_t *dense, uint8_t *packed) {
    uint32_t d = calibration->head_dim;
    const uint16_t *rows = (const uint16_t *)dense + (is_v ? (size_t)OSCAR_PAGE_TOKENS * d : 0);
    for (uint32_t token = 0; token < OSCAR_PAGE_TOKENS; token++) {
        float x[MAX_DIM];
        float centre[MAX_DIM] = {0};
        uint8_t codes[MAX_DIM];
        struct oscar_row_scale scale;
        if (!is_v)
            oscar_codec_centre(calibration, head, position + token, centre);
        for (uint32_t j = 0; j < d; j++)
            x[j] = oscar_bf16_to_float(rows[(size_t)token * d + j]) - centre[j];
        int r = oscar_codec_row(x, d, is_v ? head->rank_v : head->rank_k, is_v ? NULL : head->feedback, &scale, codes);
        if (r < 0)
            return r;
        for (uint32_t j = 0; j < d; j++)
            oscar_packed_code_set(packed, d, is_v, token, j, codes[j]);
        uint16_t pair[2] = {scale.scale, scale.zero};
        memcpy(packed + oscar_packed_scales_offset(d) + oscar_packed_scale_offset(token) + (is_v ? sizeof(pair) : 0),
               pair, sizeof(pair));
    }
    return 0;
}

int oscar_reference_pack(const struct oscar_geometry *geometry, const struct oscar_calibration *calibration,
                         const struct oscar_pack_item *item, uint32_t items) {
    uint32_t d = geometry->head_dim;
    for (uint32_t i = 0; i < items; i++) {
        int status = 0;
        for (size_t record = 0; record < (size_t)geometry->layers * geometry->kv_heads; record++)
            for (int side = 0; side < 2; side++) {
                int r = pack_side(calibration, &calibration->heads[record], item[i].position, side != 0,
                                  item[i].dense + record * oscar_dense_record_bytes(d),
                                  item[i].packed + record * oscar_packed_record_bytes(d));
                status = r < 0 ? r : status;
            }
        *item[i].status = status;
    }
    return 0;
}

/* The rotated K or V row of a token as its page stands for it: BF16, or scale * (code - zero), plus the centre for K. */
static void cached_row(const struct oscar_attend_args *args, const struct oscar_attend_item *item, uint32_t token,
                       uint32_t head, bool is_v, double *ret) {
    uint32_t d = args->geometry->head_dim;
    oscar_page_ref ref = item->pages[token / OSCAR_PAGE_TOKENS];
    unsigned form = oscar_page_ref_form(ref);
    const uint8_t *page = args->arenas[form].base + oscar_page_ref_id(ref) * args->arenas[form].stride;
    uint32_t row = token % OSCAR_PAGE_TOKENS;
    if (form != OSCAR_FORM_PACKED) {
        const uint16_t *bits = (const uint16_t *)(page + dense_row(args->geometry, args->layer, head, is_v, row));
        for (uint32_t j = 0; j < d; j++)
            ret[j] = oscar_bf16_to_float(bits[j]);
        return;
    }
    const uint8_t *record =
        page + ((size_t)args->layer * args->geometry->kv_heads + head) * oscar_packed_record_bytes(d);
    uint16_t pair[2];
    memcpy(pair, record + oscar_packed_scales_offset(d) + oscar_packed_scale_offset(row) + (is_v ? sizeof(pair) : 0),
           sizeof(pair));
    double scale = oscar_fp16_to_float(pair[0]);
    double zero = oscar_fp16_to_float(pair[1]);
    float centre[MAX_DIM] = {0};
    if (!is_v)
        oscar_codec_centre(args->calibration, oscar_calibration_head(args->calibration, args->layer, head), token,
                           centre);
    for (uint32_t j = 0; j < d; j++)
        ret[j] = scale * (oscar_packed_code_get(record, d, is_v, row, j) - zero) + centre[j];
}

/* Softmax over `count` scores in place; returns the log-sum-exp, -inf for none. */
static double softmax(double *score, uint32_t count) {
    double greatest = -INFINITY;
    for (uint32_t t = 0; t < count; t++)
        greatest = score[t] > greatest ? score[t] : greatest;
    double sum = 0.0;
    for (uint32_t t = 0; t < count; t++)
        sum += score[t] = exp(score[t] - greatest);
    for (uint32_t t = 0; t < count; t++)
        score[t] /= sum;
    return count == 0 ? -INFINITY : greatest + log(sum);
}

static double dot(const double *a, const double *b, uint32_t d) {
    double sum = 0.0;
    for (uint32_t j = 0; j < d; j++)
        sum += a[j] * b[j];
    return sum;
}

/* out = softmax(scale * k q) v over `count` rows of d; `score` holds count values. */
static double attend_rows(const double *k, const double *v, const double *q, uint32_t count, uint32_t d, double scale,
                          double *score, double *ret_out) {
    for (uint32_t t = 0; t < count; t++)
        score[t] = scale * dot(k + (size_t)t * d, q, d);
    double lse = softmax(score, count);
    for (uint32_t j = 0; j < d; j++) {
        ret_out[j] = 0.0;
        for (uint32_t t = 0; t < count; t++)
            ret_out[j] += score[t] * v[(size_t)t * d + j];
    }
    return lse;
}

int oscar_reference_attend(const struct oscar_attend_args *args, const struct oscar_attend_item *item, double *out64,
                           double *lse64) {
    const struct oscar_geometry *geometry = args->geometry;
    uint32_t d = geometry->head_dim;
    uint32_t group = geometry->query_heads / geometry->kv_heads;
    size_t values = (size_t)item->tokens * d;
    _cleanup_free_ double *k = malloc((values + 1) * sizeof(*k));
    _cleanup_free_ double *v = malloc((values + 1) * sizeof(*v));
    _cleanup_free_ double *score = malloc((item->tokens + (size_t)1) * sizeof(*score));
    if (!k || !v || !score)
        return OSCAR_ERR_NO_MEMORY;
    for (uint32_t head = 0; head < geometry->kv_heads; head++) {
        const struct oscar_head_calibration *calibration = oscar_calibration_head(args->calibration, args->layer, head);
        for (uint32_t token = 0; token < item->tokens; token++) {
            cached_row(args, item, token, head, false, k + (size_t)token * d);
            cached_row(args, item, token, head, true, v + (size_t)token * d);
        }
        for (uint32_t row = 0; row < item->rows; row++)
            for (uint32_t h = head * group; h < (head + 1) * group; h++) {
                double q[MAX_DIM];
                double rotated[MAX_DIM];
                double out[MAX_DIM];
                size_t index = (size_t)row * geometry->query_heads + h;
                uint32_t count = item->tokens == 0 ? 0 : item->tokens - item->rows + row + 1;
                for (uint32_t j = 0; j < d; j++)
                    q[j] = worker_element(geometry, item->q, row * item->q_row_stride + h * item->q_head_stride + j);
                rotate(calibration->rotation_k, d, false, q, rotated);
                double lse = attend_rows(k, v, rotated, count, d, args->softmax_scale, score, out);
                if (out64)
                    rotate(calibration->rotation_v, d, true, out, out64 + index * d);
                if (lse64)
                    lse64[index] = lse;
            }
    }
    return 0;
}

int oscar_reference_exact(const struct oscar_geometry *geometry, const float *k, const float *v, uint32_t tokens,
                          const float *q, uint32_t rows, float softmax_scale, double *out64, double *lse64) {
    uint32_t d = geometry->head_dim;
    uint32_t heads = geometry->kv_heads;
    uint32_t group = geometry->query_heads / heads;
    _cleanup_free_ double *k_head = malloc(((size_t)tokens * d + 1) * sizeof(*k_head));
    _cleanup_free_ double *v_head = malloc(((size_t)tokens * d + 1) * sizeof(*v_head));
    _cleanup_free_ double *score = malloc(((size_t)tokens + 1) * sizeof(*score));
    if (!k_head || !v_head || !score)
        return OSCAR_ERR_NO_MEMORY;
    for (uint32_t head = 0; head < heads; head++) {
        for (size_t token = 0; token < tokens; token++)
            for (uint32_t j = 0; j < d; j++) {
                k_head[token * d + j] = k[(token * heads + head) * d + j];
                v_head[token * d + j] = v[(token * heads + head) * d + j];
            }
        for (uint32_t row = 0; row < rows; row++)
            for (uint32_t h = head * group; h < (head + 1) * group; h++) {
                size_t index = (size_t)row * geometry->query_heads + h;
                double query[MAX_DIM];
                double out[MAX_DIM];
                for (uint32_t j = 0; j < d; j++)
                    query[j] = q[index * d + j];
                double lse = attend_rows(k_head, v_head, query, tokens == 0 ? 0 : tokens - rows + row + 1, d,
                                         softmax_scale, score, out);
                if (out64)
                    memcpy(out64 + index * d, out, d * sizeof(*out));
                if (lse64)
                    lse64[index] = lse;
            }
    }
    return 0;
}

void oscar_reference_merge(const struct oscar_merge_args *args, double *out64, double *lse64) {
    const struct oscar_geometry geometry = {.dtype = args->dtype};
    for (uint32_t row = 0; row < args->rows; row++)
        for (uint32_t head = 0; head < args->heads; head++) {
            size_t index = (size_t)row * args->heads + head;
            double lse[2] = {args->lse[index], args->other_lse[index]};
            double top = fmax(lse[0], lse[1]);
            double weight[2] = {lse[0] == -INFINITY ? 0.0 : exp(lse[0] - top),
                                lse[1] == -INFINITY ? 0.0 : exp(lse[1] - top)};
            double sum = weight[0] + weight[1];
            lse64[index] = sum == 0.0 ? -INFINITY : top + log(sum);
            for (uint32_t i = 0; i < args->head_dim; i++) {
                double *out = &out64[index * args->head_dim + i];
                *out = 0.0;
                if (weight[0] != 0.0)
                    *out += weight[0] / sum *
                            worker_element(&geometry, args->out,
                                           row * args->out_row_stride + head * args->out_head_stride + i);
                if (weight[1] != 0.0)
                    *out += weight[1] / sum *
                            worker_element(&geometry, args->other_out,
                                           row * args->other_row_stride + head * args->other_head_stride + i);
            }
        }
}
