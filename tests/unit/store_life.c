/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a page: reserved, sealed, shared, packed, evicted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "tests/support/store_rig.h"

#define PAGE OSCAR_PAGE_TOKENS

static struct rig rig;

static int setup(void **state) {
    (void)state;
    rig_open(&rig, &(struct rig_options){0});
    return 0;
}

static int teardown(void **state) {
    (void)state;
    rig_close(&rig);
    return 0;
}

static void a_computed_prefix_is_found_by_another_client(void **state) {
    (void)state;
    struct rig_client *a = rig_client_new(&rig, "g"), *b = rig_client_new(&rig, "g");
    uint32_t tokens[20 * PAGE];
    rig_tokens(1, 0, 20 * PAGE, tokens);

    struct rig_seq *writer, *reader;
    assert_int_equal(rig_seq_open(a, tokens, 20 * PAGE, false, &writer), 0);
    assert_int_equal(writer->committed, 0);
    assert_int_equal(rig_seq_compute(writer, tokens, 20 * PAGE - 10), 0);
    assert_int_equal(rig_metric(&rig, "oscar_pages_sealed_total", ""), 19);

    assert_int_equal(rig_seq_open(b, tokens, 20 * PAGE, false, &reader), 0);
    assert_int_equal(reader->committed, 19 * PAGE);
    rig_seq_check(reader);
    assert_int_equal(rig_seq_form(reader, 0), OSCAR_FORM_SINK);
    for (uint32_t page = 1; page < 15; page++)
        assert_int_equal(rig_seq_form(reader, page), OSCAR_FORM_PACKED);
    for (uint32_t page = 15; page < 19; page++)
        assert_int_equal(rig_seq_form(reader, page), OSCAR_FORM_DENSE);

    rig_seq_close(writer, true);
    rig_client_free(a);
    rig_settle(&rig);
    rig_seq_check(reader);
    rig_seq_close(reader, true);
    rig_client_free(b);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"packed\""), 18);
    assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"dense\""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_memory_chunk_bytes", "form=\"dense\""), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_computed_prefix_is_found_by_another_client, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
