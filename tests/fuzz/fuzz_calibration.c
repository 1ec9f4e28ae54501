/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A calibration file for the smallest model. Accepted without looking at its numbers, as a client does, nothing in it may point outside
 * the file; accepted with, as the daemon does, it must be accepted without as well.
 */
#include <string.h>

#include "proto/calibration.h"
#include "proto/cleanup.h"
#include "proto/text.h"
#include "tests/fuzz/fuzz.h"

#define DIM 64U
#define TURN_PAGES 2U

static const struct oscar_geometry geometry = {
    .layers = 1,
    .query_heads = 1,
    .kv_heads = 1,
    .head_dim = DIM,
    .dtype = OSCAR_BF16,
    .page_tokens = OSCAR_PAGE_TOKENS,
    .sink_tokens = OSCAR_SINK_TOKENS,
    .recent_tokens = OSCAR_RECENT_TOKENS,
};

static void calibration_cleanup(struct oscar_calibration **calibration) { oscar_calibration_free(*calibration); }

static void touch_floats(const float *first, size_t count) {
    if (first != NULL && count > 0) {
        FUZZ_REQUIRE((uintptr_t)first % _Alignof(float) == 0);
        fuzz_touch(first);
        fuzz_touch(first + count - 1);
    }
}

static void check_head(const struct oscar_calibration *calibration, const struct oscar_head_calibration *head) {
    FUZZ_REQUIRE((head->rotation_k != NULL) == (calibration->rotation_k == OSCAR_ROTATION_MATRIX));
    FUZZ_REQUIRE((head->rotation_v != NULL) == (calibration->rotation_v == OSCAR_ROTATION_MATRIX));
    touch_floats(head->rotation_k, (size_t)DIM * DIM);
    touch_floats(head->rotation_v, (size_t)DIM * DIM);
    touch_floats(head->feedback, (size_t)DIM * DIM);
    touch_floats(head->centre_static, DIM);
    touch_floats(head->centre_cos, (size_t)head->pairs * DIM);
    touch_floats(head->centre_sin, (size_t)head->pairs * DIM);
    FUZZ_REQUIRE(head->pairs <= OSCAR_MAX_PAIRS && (head->pairs == 0 || head->centre_static != NULL));
    for (uint32_t i = 0; i < head->pairs; i++)
        FUZZ_REQUIRE(head->centre_pair[i] >= 0 && (uint32_t)head->centre_pair[i] < calibration->frequencies);
    FUZZ_REQUIRE(head->rank_k < DIM && head->rank_v < DIM);
}

/* The turn tables, as the daemon makes them and a client attaches them. */
static void check_turns(struct oscar_calibration *calibration) {
    size_t bytes = oscar_turns_bytes(calibration, TURN_PAGES);
    FUZZ_REQUIRE((bytes == 0) == (calibration->frequencies == 0));
    _cleanup_free_ uint8_t *memory = malloc(bytes);
    FUZZ_REQUIRE(memory != NULL || bytes == 0);
    oscar_turns_fill(calibration, TURN_PAGES, memory);
    if (bytes > 0)
        FUZZ_REQUIRE(oscar_calibration_attach_turns(calibration, memory, bytes - 1, TURN_PAGES) == OSCAR_ERR_INVALID);
    FUZZ_REQUIRE(oscar_calibration_attach_turns(calibration, memory, bytes, TURN_PAGES) == 0);
    const struct oscar_turns *turns = &calibration->turns;
    FUZZ_REQUIRE(turns->frequencies == calibration->frequencies);
    touch_floats(turns->row_turn, (size_t)OSCAR_TURN_ROWS * turns->frequencies * 2);
    touch_floats(turns->page_turn, (size_t)turns->pages * turns->frequencies * 2);
}

static int parse(const void *bytes, size_t size, int verify) {
    _cleanup_(calibration_cleanup) struct oscar_calibration *calibration = NULL;
    struct oscar_cause cause = {0};
    int r = oscar_calibration_parse(bytes, size, &geometry, verify, &calibration, &cause);
    if (r < 0) {
        FUZZ_REQUIRE((r == OSCAR_ERR_CALIBRATION || r == OSCAR_ERR_CORRUPT) && calibration == NULL);
        FUZZ_REQUIRE(cause.text[0] != '\0' && oscar_text_valid(cause.text, strlen(cause.text)));
        return r;
    }
    FUZZ_REQUIRE(calibration->layers == 1 && calibration->kv_heads == 1 && calibration->head_dim == DIM);
    check_head(calibration, oscar_calibration_head(calibration, 0, 0));
    check_turns(calibration);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    /* Aligned as the contract wants it, and ending where the file ends, for the sanitizer's sake. */
    _cleanup_free_ void *file = malloc(size);
    FUZZ_REQUIRE(file != NULL);
    if (size > 0)
        memcpy(file, bytes, size);
    int trusting = parse(file, size, 0), careful = parse(file, size, 1);
    FUZZ_REQUIRE(trusting == 0 || careful == trusting);
    return 0;
}
