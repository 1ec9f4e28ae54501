/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/quantise.h"

#include <cblas.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "calib/attention.h"
#include "calib/rotation.h"
#include "kernels/codec.h"
#include "kernels/host/level_code.h"
#include "kernels/rotate.h"
#include "proto/cleanup.h"
#include "proto/half.h"
#include "proto/page.h"

enum side { SIDE_K, SIDE_V, SIDES };

struct quantiser {
    const struct oscar_calibration *calibration;
    const struct oscar_head_calibration *head;
    const struct host_level_code *code;
    struct host_pack_scratch *scratch;
    uint64_t first_position;
    uint32_t tokens, d;
    uint32_t begin, pages;                 /* row of the first page that can be packed, and how many there are */
    uint16_t *rows[SIDES];                 /* rotated, BF16 [tokens][d] */
    float *centre;                         /* [pages * 64][d] */
    double *rotation[SIDES];               /* R, [d][d] */
    double *block;                         /* [64][d] */
    uint8_t *dense, *packed;               /* a page's records */
    struct oscar_code_place *place[SIDES]; /* [64][d] */
};

void quantiser_free(struct quantiser *quantiser) {
    if (quantiser == NULL)
        return;
    for (enum side side = 0; side < SIDES; side++) {
        free(quantiser->rows[side]);
        free(quantiser->rotation[side]);
        free(quantiser->place[side]);
    }
    free(quantiser->scratch);
    free(quantiser->centre);
    free(quantiser->block);
    free(quantiser->dense);
    free(quantiser->packed);
    free(quantiser);
}

void quantiser_cleanup(struct quantiser **quantiser) { quantiser_free(*quantiser); }

static int allocate(struct quantiser *q, struct oscar_cause *cause) {
    const size_t d = q->d;
    const size_t page = OSCAR_PAGE_TOKENS * d;
    bool good = true;
    for (enum side side = 0; side < SIDES; side++) {
        good = (q->rows[side] = malloc(q->tokens * d * sizeof(uint16_t))) != NULL && good;
        good = (q->rotation[side] = malloc(d * d * sizeof(double))) != NULL && good;
        good = (q->place[side] = malloc(page * sizeof(struct oscar_code_place))) != NULL && good;
    }
    size_t scratch_bytes = (q->code->pack_scratch_bytes() + 63) / 64 * 64;
    good = (q->scratch = aligned_alloc(64, scratch_bytes)) != NULL && good;
    good = (q->centre = malloc((q->pages * page + 1) * sizeof(float))) != NULL && good;
    good = (q->block = malloc(page * sizeof(double))) != NULL && good;
    good = (q->dense = aligned_alloc(64, oscar_dense_record_bytes(q->d))) != NULL && good;
    good = (q->packed = aligned_alloc(64, oscar_packed_record_bytes(q->d))) != NULL && good;
    return good ? 0
                : oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory to pack %" PRIu32 " tokens of a head", q->tokens);
}

static void rotate_rows(struct quantiser *q, enum host_level level, enum side side, const float *rows) {
    const float *matrix = side == SIDE_K ? q->head->rotation_k : q->head->rotation_v;
    float turned[OSCAR_PAGE_TOKENS * 256U];
    for (uint32_t at = 0; at < q->tokens; at += OSCAR_PAGE_TOKENS) {
        uint32_t count = q->tokens - at < OSCAR_PAGE_TOKENS ? q->tokens - at : OSCAR_PAGE_TOKENS;
        oscar_rotate(level, matrix, q->d, false, count, rows + (size_t)at * q->d, q->d, turned, q->d);
        for (size_t i = 0; i < (size_t)count * q->d; i++)
            q->rows[side][(size_t)at * q->d + i] = oscar_bfloat_from_float(turned[i]);
    }
    if (matrix == NULL)
        rotation_hadamard(q->d, q->rotation[side]);
    for (size_t i = 0; matrix != NULL && i < (size_t)q->d * q->d; i++)
        q->rotation[side][i] = (double)matrix[i];
}

int quantiser_new(const struct oscar_calibration *calibration, const struct oscar_head_calibration *head,
                  uint64_t first_position, uint32_t tokens, const float *k, const float *v, struct quantiser **ret,
                  struct oscar_cause *cause) {
    enum host_level level;
    int r = host_level_current(&level, cause);
    if (r < 0)
        return r;
    _cleanup_(quantiser_cleanup) struct quantiser *q = calloc(1, sizeof(*q));
    if (q == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory to pack a head");
    q->calibration = calibration;
    q->head = head;
    q->code = host_level_code(level);
    q->first_position = first_position;
    q->tokens = tokens;
    q->d = calibration->head_dim;
    q->begin = attention_packed_begin(first_position);
    q->pages = tokens > q->begin ? (tokens - q->begin) / OSCAR_PAGE_TOKENS : 0;
    if ((r = allocate(q, cause)) < 0)
        return r;
    rotate_rows(q, level, SIDE_K, k);
    rotate_rows(q, level, SIDE_V, v);
    for (uint32_t i = 0; i < q->pages * OSCAR_PAGE_TOKENS; i++)
        oscar_codec_centre(calibration, head, first_position + q->begin + i, q->centre + (size_t)i * q->d);
    for (uint32_t token = 0; token < OSCAR_PAGE_TOKENS; token++)
        for (uint32_t dim = 0; dim < q->d; dim++) {
            q->place[SIDE_K][token * q->d + dim] = oscar_packed_k_place(q->d, token, dim);
            q->place[SIDE_V][token * q->d + dim] = oscar_packed_v_place(q->d, token, dim);
        }
    *ret = TAKE_PTR(q);
    return 0;
}

/* The rows in the block, turned back by Rᵀ. */
static void turn_back(const struct quantiser *q, enum side side, uint32_t rows, double *ret) {
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)q->d, (int)q->d, 1.0, q->block, (int)q->d,
                q->rotation[side], (int)q->d, 0.0, ret, (int)q->d);
}

void quantiser_dense(struct quantiser *q, double *ret_k, double *ret_v) {
    for (enum side side = 0; side < SIDES; side++)
        for (uint32_t at = 0; at < q->tokens; at += OSCAR_PAGE_TOKENS) {
            uint32_t count = q->tokens - at < OSCAR_PAGE_TOKENS ? q->tokens - at : OSCAR_PAGE_TOKENS;
            for (size_t i = 0; i < (size_t)count * q->d; i++)
                q->block[i] = (double)oscar_float_from_bfloat(q->rows[side][(size_t)at * q->d + i]);
            turn_back(q, side, count, (side == SIDE_K ? ret_k : ret_v) + (size_t)at * q->d);
        }
}

static void read_codes(const struct quantiser *q, enum side side, uint32_t page, double *ret) {
    const uint8_t *codes = q->packed + (side == SIDE_K ? 0 : oscar_packed_v_offset(q->d));
    const struct oscar_code_place *place = q->place[side];
    for (uint32_t token = 0; token < OSCAR_PAGE_TOKENS; token++) {
        uint16_t scales[4];
        memcpy(scales, q->packed + oscar_packed_scales_offset(q->d) + oscar_packed_scale_offset(token), sizeof(scales));
        double scale = (double)oscar_float_from_half(scales[2 * side]);
        double zero = (double)oscar_float_from_half(scales[2 * side + 1]);
        const float *centre = q->centre + ((size_t)page * OSCAR_PAGE_TOKENS + token) * q->d;
        for (uint32_t dim = 0; dim < q->d; dim++, place++) {
            double value = scale * ((double)(codes[place->byte] >> place->shift & 3) - zero);
            q->block[(size_t)token * q->d + dim] = side == SIDE_K ? value + (double)centre[dim] : value;
        }
    }
    turn_back(q, side, OSCAR_PAGE_TOKENS, ret);
}

int quantiser_packed(struct quantiser *q, double *ret_k, double *ret_v, struct oscar_cause *cause) {
    const size_t side_bytes = (size_t)OSCAR_PAGE_TOKENS * q->d * sizeof(uint16_t);
    q->code->pack_begin(q->scratch, q->calibration, q->head);
    for (uint32_t page = 0; page < q->pages; page++) {
        size_t at = (q->begin + (size_t)page * OSCAR_PAGE_TOKENS) * q->d;
        uint64_t position = q->first_position + q->begin + (uint64_t)page * OSCAR_PAGE_TOKENS;
        memcpy(q->dense, q->rows[SIDE_K] + at, side_bytes);
        memcpy(q->dense + side_bytes, q->rows[SIDE_V] + at, side_bytes);
        if (!q->code->pack(q->scratch, q->dense, position, q->packed))
            return oscar_fail(cause, OSCAR_ERR_NOT_FINITE,
                              "the page at position %" PRIu64 " does not pack: a value is beyond %g", position,
                              (double)OSCAR_MAX_ROW_MAGNITUDE);
        read_codes(q, SIDE_K, page, ret_k + at);
        read_codes(q, SIDE_V, page, ret_v + at);
    }
    return 0;
}
