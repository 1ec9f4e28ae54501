/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/e2e_hold.h"

#include <errno.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"

static void wait_for(sem_t *semaphore) {
    while (sem_wait(semaphore) < 0 && errno == EINTR)
        ;
}

static void stand_still(void *argument) {
    struct e2e_hold *hold = argument;
    sem_post(&hold->entered);
    wait_for(&hold->released);
}

void e2e_hold_open(struct e2e_hold *hold, struct oscar_client *client) {
    struct oscar_stream_params params = {.size = sizeof(params), .threads = 1, .asynchronous = 1};
    sem_init(&hold->entered, 0, 0);
    sem_init(&hold->released, 0, 0);
    MUST(oscar_stream_open(client, &params, &hold->stream));
}

void e2e_hold_up(struct e2e_hold *hold) {
    MUST(oscar_stream_call(hold->stream, stand_still, hold));
    wait_for(&hold->entered);
}

void e2e_hold_release(struct e2e_hold *hold) { sem_post(&hold->released); }

void e2e_hold_close(struct e2e_hold *hold) {
    oscar_stream_close(hold->stream);
    sem_destroy(&hold->entered);
    sem_destroy(&hold->released);
}
