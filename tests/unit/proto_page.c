/* SPDX-License-Identifier: Apache-2.0 */
/* The page layout: golden bytes, and that its places are a bijection. */
#include <stdio.h>
#include <string.h>

#include "proto/page.h"
#include "proto_golden.h"
#include "proto_test.h"

static const uint32_t head_dims[] = {64, 128, 256};
#define HEAD_DIMS (sizeof(head_dims) / sizeof(head_dims[0]))
#define MAX_RECORD_BYTES (32 * 256 + 512)

/* The same arbitrary content as tests/data/proto/make_digests.py, which writes the bytes by the layout's text. */
static unsigned test_code(unsigned side, uint32_t token, uint32_t dim) {
    return (token * 7 + dim * 13 + token * dim / 5 + side) % 4;
}

static void a_record_has_the_golden_bytes(void **state) {
    (void)state;
    for (size_t n = 0; n < HEAD_DIMS; n++) {
        uint32_t d = head_dims[n];
        uint8_t record[MAX_RECORD_BYTES];
        struct oscar_digest digest;
        char name[8];
        memset(record, 0xa5, sizeof(record)); /* every bit must be written */
        for (uint32_t token = 0; token < OSCAR_PAGE_TOKENS; token++) {
            for (uint32_t dim = 0; dim < d; dim++) {
                for (unsigned side = 0; side < 2; side++)
                    oscar_packed_code_set(record, d, side, token, dim, test_code(side, token, dim));
            }
            uint8_t *scales = record + oscar_packed_scales_offset(d) + oscar_packed_scale_offset(token);
            for (unsigned part = 0; part < 4; part++) {
                unsigned value = 0x1000 * part + token;
                scales[2 * part] = (uint8_t)value;
                scales[2 * part + 1] = (uint8_t)(value >> 8);
            }
        }
        oscar_content_digest(record, oscar_packed_record_bytes(d), &digest);
        (void)snprintf(name, sizeof(name), "%u", d);
        assert_golden("page", name, &digest);
        for (uint32_t token = 0; token < OSCAR_PAGE_TOKENS; token++) {
            for (uint32_t dim = 0; dim < d; dim++) {
                for (unsigned side = 0; side < 2; side++)
                    assert_int_equal(oscar_packed_code_get(record, d, side, token, dim), test_code(side, token, dim));
            }
        }
    }
}

static void code_places_are_distinct_and_cover_the_record(void **state) {
    (void)state;
    for (size_t n = 0; n < HEAD_DIMS; n++) {
        uint32_t d = head_dims[n];
        for (unsigned side = 0; side < 2; side++) {
            uint8_t seen[16 * 256] = {0};
            for (uint32_t token = 0; token < OSCAR_PAGE_TOKENS; token++) {
                for (uint32_t dim = 0; dim < d; dim++) {
                    struct oscar_code_place place =
                        side == 0 ? oscar_packed_k_place(d, token, dim) : oscar_packed_v_place(d, token, dim);
                    assert_true(place.byte < 16 * d);
                    assert_true(place.shift % 2 == 0 && place.shift < 8);
                    assert_int_equal(seen[place.byte] >> place.shift & 3, 0);
                    seen[place.byte] |= (uint8_t)(3U << place.shift);
                }
            }
            for (uint32_t i = 0; i < 16 * d; i++)
                assert_int_equal(seen[i], 0xff);
        }
    }
}

static void scales_are_distinct_and_cover_their_part(void **state) {
    (void)state;
    uint8_t seen[OSCAR_SCALES_BYTES] = {0};
    for (uint32_t token = 0; token < OSCAR_PAGE_TOKENS; token++) {
        size_t offset = oscar_packed_scale_offset(token);
        assert_true(offset % 8 == 0 && offset + 8 <= OSCAR_SCALES_BYTES);
        assert_int_equal(seen[offset], 0);
        memset(seen + offset, 1, 8);
    }
    for (size_t i = 0; i < sizeof(seen); i++)
        assert_int_equal(seen[i], 1);
}

static void the_published_example_holds_for_head_dim_128(void **state) {
    (void)state;
    /* Row 9 = g 1 + 8; dim 32f + 16u + 4t + k with f = 2, u = 1, t = 3, k = 2: word W + u of lane 4g + t. */
    struct oscar_code_place k = oscar_packed_k_place(128, 16 + 9, 32 * 2 + 16 + 4 * 3 + 2);
    assert_int_equal(k.byte, (32 + 4 * 1 + 3) * 16 + (2 + 1) * 4 + 2);
    assert_int_equal(k.shift, 4);
    /* Token 8 + 2t + u with t = 1, u = 1 of tile 0; dim 16i + 8r + g with i = 5, r = 1, g = 6. */
    struct oscar_code_place v = oscar_packed_v_place(128, 8 + 2 + 1, 16 * 5 + 8 + 6);
    assert_int_equal(v.byte, (4 * 6 + 1) * 16 + (2 + 1) * 4 + 2 + 1);
    assert_int_equal(v.shift, 2);
}

static void page_references_keep_form_and_id(void **state) {
    (void)state;
    const uint64_t ids[] = {0, 1, UINT64_C(1) << 32, OSCAR_PAGE_ID_MASK};
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
            oscar_page_ref ref = oscar_page_ref_make((enum oscar_form)form, ids[i]);
            assert_true(ref != 0);
            assert_int_equal(oscar_page_ref_form(ref), form);
            assert_true(oscar_page_ref_id(ref) == ids[i]);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_record_has_the_golden_bytes),
        cmocka_unit_test(code_places_are_distinct_and_cover_the_record),
        cmocka_unit_test(scales_are_distinct_and_cover_their_part),
        cmocka_unit_test(the_published_example_holds_for_head_dim_128),
        cmocka_unit_test(page_references_keep_form_and_id),
    };
    return cmocka_run_group_tests_name("proto_page", tests, NULL, NULL);
}
