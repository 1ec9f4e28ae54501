/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device call of the daemon's that does not return: what needs no device is answered all the same, and what was held up goes on
 * when the call comes back. The call is wedged in the driver's library (tests/support/wedged_driver.c), a GPU's or the emulated one; the
 * host backend has no such place, and is tested with a device that hangs (e2e_hang.c).
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define TOKENS 400U /* the sink, the window and a page that is packed */
#define STANDSTILL_S 3
#define WAIT_MS 30000

static char wedge[64];

static void wedge_calls(void) {
    int fd = open(wedge, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
}

static void let_go(void) { assert_int_equal(unlink(wedge), 0); }

struct hit {
    struct e2e_worker *worker;
    const struct text *text;
    uint32_t tokens;
};

static bool hits(void *argument) {
    const struct hit *hit = argument;
    return e2e_probe(hit->worker, hit->text, hit->text->count) == hit->tokens;
}

/* Stores and says so: sealing is left to a device that stands still. */
static struct oscar_seq *leave_to_seal(struct e2e_worker *worker, const struct text *text) {
    struct oscar_seq *seq = e2e_open(worker, text, text->count, 0);
    MUST(oscar_seq_reserve(seq, text->count));
    e2e_store(worker, seq, NULL, text, 0, text->count);
    MUST(oscar_seq_advance(seq, NULL, text->ids, text->count));
    return seq;
}

static void a_call_that_does_not_return_holds_up_only_what_needs_it(void **state) {
    struct e2e_worker writer, reader;
    struct text known = {0}, held = {0};
    text_append(&known, 1, TOKENS);
    text_append(&held, 2, TOKENS);
    e2e_worker_open(&writer, e2e_socket(*state), "writer");
    e2e_worker_open(&reader, e2e_socket(*state), "reader");
    struct oscar_seq *seq = e2e_open(&writer, &known, TOKENS, 0);
    e2e_extend(&writer, seq, &known, TOKENS);
    uint32_t all = TOKENS / OSCAR_PAGE_TOKENS * OSCAR_PAGE_TOKENS;

    wedge_calls();
    struct oscar_seq *waiting = leave_to_seal(&writer, &held);
    time_t end = time(NULL) + STANDSTILL_S;
    for (unsigned round = 0; time(NULL) < end || round < 10; round++) {
        MUST(oscar_client_ping(reader.client));
        assert_true(e2e_metric(*state, "oscard_clients") == 2);
        assert_int_equal(e2e_probe(&reader, &known, TOKENS), all);
        assert_int_equal(e2e_probe(&reader, &held, TOKENS), 0); /* not sealed, not seen */
        struct oscar_seq *hit = e2e_open(&reader, &known, TOKENS, 0);
        assert_int_equal(e2e_info(hit).hit_tokens, all);
        e2e_check_some(&reader, hit, &known, all, &(uint64_t){round}, 1);
        oscar_seq_close(hit);
    }
    e2e_flush(*state); /* the cache forgets what it has; who reads it goes on reading */
    assert_int_equal(e2e_probe(&reader, &known, TOKENS), 0);
    let_go();
    struct hit sealed = {&reader, &held, all};
    assert_true(wait_until(hits, &sealed, WAIT_MS));
    e2e_check_some(&writer, waiting, &held, TOKENS, &(uint64_t){1}, 8);
    e2e_check_some(&writer, seq, &known, TOKENS, &(uint64_t){2}, 8);
    e2e_worker_close(&writer);
    e2e_worker_close(&reader);
    text_free(&known);
    text_free(&held);
}

/* In the daemon's process alone. */
static void take_wedged_driver(const struct test_daemon *daemon) {
    (void)daemon;
    const char *driver = getenv("OSCAR_TEST_WEDGED_DRIVER");
    setenv("OSCAR_CUDA_DRIVER", driver != NULL ? driver : WEDGED_DRIVER, 1);
    setenv("OSCAR_TEST_WEDGE", wedge, 1);
}

static int start(void **state) {
    snprintf(wedge, sizeof(wedge), "/tmp/oscar-wedge-XXXXXX");
    int fd = mkostemp(wedge, O_CLOEXEC);
    assert_true(fd >= 0);
    close(fd);
    let_go();
    struct test_daemon *daemon = daemon_start_prepared(NULL, take_wedged_driver);
    *state = daemon;
    return setenv("OSCAR_SOCKET", daemon->socket, 1);
}

static int stop(void **state) {
    (void)unlink(wedge);
    daemon_stop(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_call_that_does_not_return_holds_up_only_what_needs_it, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
