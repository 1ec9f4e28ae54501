/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The turn tables: [64 rows][frequencies]{cos, sin}, then [pages][frequencies]{cos, sin}. The rows come first, so that a
 * table for more pages is the old one with more behind it.
 */
#include <math.h>

#include "proto/calibration.h"
#include "proto/half.h"
#include "proto/page.h"

static size_t turn_floats(const struct oscar_calibration *calibration, size_t turns) {
    return turns * calibration->frequencies * 2;
}

size_t oscar_turns_bytes(const struct oscar_calibration *calibration, uint32_t pages) {
    return turn_floats(calibration, (size_t)OSCAR_TURN_ROWS + pages) * sizeof(float);
}

/* The matrix unit of the reader holds a row's turn in binary16: rounded so here, packer and reader use the same value. */
static float round_to_half(double value) { return oscar_float_from_half(oscar_half_from_float((float)value)); }

void oscar_turns_fill(const struct oscar_calibration *calibration, uint32_t pages, void *memory) {
    float *at = memory;
    for (uint32_t row = 0; row < OSCAR_TURN_ROWS; row++) {
        for (uint32_t i = 0; i < calibration->frequencies; i++) {
            double angle = calibration->omega[i] * (double)row;
            *at++ = round_to_half(cos(angle));
            *at++ = round_to_half(sin(angle));
        }
    }
    for (uint32_t page = 0; page < pages; page++) {
        double position = (double)page * OSCAR_PAGE_TOKENS;
        for (uint32_t i = 0; i < calibration->frequencies; i++) {
            double angle = calibration->omega[i] * position;
            *at++ = (float)cos(angle);
            *at++ = (float)sin(angle);
        }
    }
}

int oscar_calibration_attach_turns(struct oscar_calibration *calibration, const void *memory, size_t bytes,
                                   uint32_t pages) {
    if (calibration->frequencies == 0)
        return OSCAR_OK;
    if (bytes < oscar_turns_bytes(calibration, pages) || (uintptr_t)memory % sizeof(float) != 0)
        return OSCAR_ERR_INVALID;
    const float *rows = memory;
    calibration->turns = (struct oscar_turns){
        .page_turn = rows + turn_floats(calibration, OSCAR_TURN_ROWS),
        .row_turn = rows,
        .pages = pages,
        .frequencies = calibration->frequencies,
    };
    return OSCAR_OK;
}
