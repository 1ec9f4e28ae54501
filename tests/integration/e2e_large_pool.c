/* SPDX-License-Identifier: Apache-2.0 */
/* Pages that lie beyond 2^31 and 2^32 bytes of their pool. The pool is sparse: only what is written takes memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"

#define BUDGET "12G"
#define SPACER_TOKENS 20480U /* 320 pages of 16 MiB: 5 GiB */

static void rows_beyond_4_gib_are_read_as_they_were_written(void **state) {
    struct oscar_geometry geometry;
    oscar_geometry_init(&geometry, 64, 8, 8, 128, OSCAR_BF16); /* 64 * 8 * 32 KiB = 16 MiB a page */
    struct e2e_worker worker;
    struct oscar_model_info info = {.size = sizeof(info)};
    struct text text = {0}, low = {0};
    text_append(&text, 1, 100);
    text_append(&low, 2, 100);
    e2e_worker_open_geometry(&worker, e2e_socket(*state), "large", &geometry);
    MUST(oscar_model_info(worker.model, &info));
    assert_int_equal(info.dense_page_bytes, UINT64_C(16) << 20);

    /* Two sequences with a spacer between them that is reserved and never written. */
    struct oscar_seq *first = e2e_open(&worker, &low, low.count, 0);
    MUST(oscar_seq_reserve(first, low.count));
    struct oscar_seq *spacer = e2e_open(&worker, &low, 0, 0);
    MUST(oscar_seq_reserve(spacer, SPACER_TOKENS));
    struct oscar_seq *last = e2e_open(&worker, &text, text.count, 0);
    MUST(oscar_seq_reserve(last, text.count));
    void *k_low, *k_high, *v;
    uint32_t rows;
    MUST(oscar_seq_rows(first, 0, 0, 0, &k_low, &v, &rows));
    MUST(oscar_seq_rows(last, 0, 0, 0, &k_high, &v, &rows));
    uintptr_t low_address = (uintptr_t)k_low, high_address = (uintptr_t)k_high;
    assert_true((low_address < high_address ? high_address - low_address : low_address - high_address) >
                (UINT64_C(1) << 32));

    e2e_store(&worker, first, NULL, &low, 0, low.count);
    e2e_store(&worker, last, NULL, &text, 0, text.count);
    e2e_check_some(&worker, last, &text, text.count, &(uint64_t){1}, 6);
    e2e_check_some(&worker, first, &low, low.count, &(uint64_t){2}, 6);
    MUST(oscar_seq_advance(first, NULL, low.ids, low.count));
    MUST(oscar_seq_advance(last, NULL, text.ids, text.count));
    /* Page 0 of each becomes a sink, in another arena; what comes then lies high, too. */
    e2e_check_some(&worker, last, &text, text.count, &(uint64_t){3}, 6);
    e2e_check_some(&worker, first, &low, low.count, &(uint64_t){4}, 6);
    oscar_seq_close(spacer);
    oscar_seq_close(first);
    e2e_check_some(&worker, last, &text, text.count, &(uint64_t){5}, 6);
    e2e_worker_close(&worker);
    text_free(&text);
    text_free(&low);
}

static int start(void **state) { return e2e_start(state, BUDGET); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(rows_beyond_4_gib_are_read_as_they_were_written, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
