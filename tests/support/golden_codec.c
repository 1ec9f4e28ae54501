/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/golden_codec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/safetensors.h"

const char *const golden_names[GOLDEN_FILES] = {"d64-m0", "d64-m16", "d128-m0", "d128-m8", "d128-m16", "d256-m8"};

static void *golden_own(struct golden *golden, size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    assert_non_null(memory);
    golden->owned[golden->owned_count++] = memory;
    return memory;
}

static void *golden_tensor(struct golden *golden, const struct oscar_safetensors *file, const char *name,
                           uint64_t *ret_elements) {
    struct oscar_tensor_view view;
    assert_int_equal(oscar_safetensors_find(file, name, &view), 0);
    void *copy = golden_own(golden, view.bytes);
    if (view.bytes > 0)
        memcpy(copy, view.data, view.bytes);
    if (ret_elements)
        *ret_elements = view.elements;
    return copy;
}

struct golden *golden_open(const char *name) {
    struct golden *golden = calloc(1, sizeof(*golden));
    assert_non_null(golden);
    char path[512];
    snprintf(path, sizeof(path), OSCAR_TEST_DATA "/golden/codec-%s.safetensors", name);
    struct oscar_safetensors *file;
    struct oscar_cause cause = {0};
    if (oscar_safetensors_open(path, &file, &cause) < 0)
        fail_msg("%s: %s", path, cause.text);
    uint64_t elements, frequencies;
    golden->rows = golden_tensor(golden, file, "rows", &elements);
    golden->d = (uint32_t)(elements / GOLDEN_ROWS);
    golden->positions = golden_tensor(golden, file, "positions", NULL);
    golden->centre = golden_tensor(golden, file, "centre", NULL);
    golden->scale = golden_tensor(golden, file, "scale", NULL);
    golden->zero = golden_tensor(golden, file, "zero", NULL);
    golden->nearest = golden_tensor(golden, file, "codes_nearest", NULL);
    golden->feedback = golden_tensor(golden, file, "codes_feedback", NULL);
    uint32_t rank = (uint32_t) * (int32_t *)golden_tensor(golden, file, "rank", NULL);
    golden->calibration.omega = golden_tensor(golden, file, "omega", &frequencies);
    int32_t *pair = golden_own(golden, sizeof(*pair) * (frequencies + 1));
    for (uint32_t i = 0; i < frequencies; i++)
        pair[i] = (int32_t)i;
    golden->head = (struct oscar_head_calibration){
        .feedback = golden_tensor(golden, file, "feedback_factor", NULL),
        .centre_static = golden_tensor(golden, file, "centre_static", NULL),
        .centre_cos = golden_tensor(golden, file, "centre_a", NULL),
        .centre_sin = golden_tensor(golden, file, "centre_b", NULL),
        .centre_pair = pair,
        .pairs = (uint32_t)frequencies,
        .rank_k = rank,
        .rank_v = rank,
    };
    golden->geometry = (struct oscar_geometry){
        1, 1, 1, golden->d, OSCAR_BF16, OSCAR_PAGE_TOKENS, OSCAR_SINK_TOKENS, OSCAR_RECENT_TOKENS};
    struct oscar_calibration *calibration = &golden->calibration;
    calibration->layers = calibration->kv_heads = 1;
    calibration->head_dim = golden->d;
    calibration->frequencies = (uint32_t)frequencies;
    calibration->heads = &golden->head;
    if (frequencies > 0) {
        const uint32_t pages = 1U << 14; /* positions below 2^20 */
        size_t bytes = oscar_turns_bytes(calibration, pages);
        void *turns = golden_own(golden, bytes);
        oscar_turns_fill(calibration, pages, turns);
        assert_int_equal(oscar_calibration_attach_turns(calibration, turns, bytes, pages), 0);
    }
    oscar_safetensors_free(file);
    return golden;
}

void golden_close(struct golden *golden) {
    for (uint32_t i = 0; i < golden->owned_count; i++)
        free(golden->owned[i]);
    free(golden);
}

void golden_expect_row(const uint8_t *packed, uint32_t d, unsigned side, uint32_t token, uint16_t scale, uint16_t zero,
                       const uint8_t *codes) {
    uint16_t pair[2];
    memcpy(pair, packed + oscar_packed_scales_offset(d) + oscar_packed_scale_offset(token) + side * sizeof(pair),
           sizeof(pair));
    assert_int_equal(pair[0], scale);
    assert_int_equal(pair[1], zero);
    for (uint32_t j = 0; j < d; j++)
        assert_int_equal(oscar_packed_code_get(packed, d, side, token, j), codes[j]);
}
