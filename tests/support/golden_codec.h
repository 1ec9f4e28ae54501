/* SPDX-License-Identifier: Apache-2.0 */
/* The codec's golden vectors, made by another hand (tests/data/golden): what a row at a position must become. */
#ifndef OSCAR_TESTS_GOLDEN_CODEC_H
#define OSCAR_TESTS_GOLDEN_CODEC_H

#include "tests/support/kernel_fixture.h"

#define GOLDEN_ROWS 384U
#define GOLDEN_FILES 6U
extern const char *const golden_names[GOLDEN_FILES];

/* A file as a model of one layer and one head, and its tensors in aligned copies. */
struct golden {
    uint32_t d;
    struct oscar_geometry geometry;
    struct oscar_calibration calibration;
    struct oscar_head_calibration head;
    uint16_t *rows;     /* [row][d] */
    int64_t *positions; /* [row], below 2^20 */
    float *centre;      /* [row][d] */
    uint16_t *scale, *zero;
    uint8_t *nearest, *feedback; /* codes, [row][d] */
    void *owned[24];
    uint32_t owned_count;
};

struct golden *golden_open(const char *name);
void golden_close(struct golden *golden);

/* That row `token` of the packed record's side holds this scale, zero and these codes. */
void golden_expect_row(const uint8_t *packed, uint32_t d, unsigned side, uint32_t token, uint16_t scale, uint16_t zero,
                       const uint8_t *codes);

#endif
