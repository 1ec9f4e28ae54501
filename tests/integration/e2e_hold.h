/* SPDX-License-Identifier: Apache-2.0 */
/* Holds an asynchronous stream up until a test lets it go: a writer or reader whose device is slow. */
#ifndef OSCAR_TESTS_E2E_HOLD_H
#define OSCAR_TESTS_E2E_HOLD_H

#include <semaphore.h>

#include "oscar/oscar.h"

struct e2e_hold {
    struct oscar_stream *stream;
    sem_t entered, released;
};

/* Opens an asynchronous stream. */
void e2e_hold_open(struct e2e_hold *hold, struct oscar_client *client);
/* Enqueues the hold-up and returns when the stream stands in it. */
void e2e_hold_up(struct e2e_hold *hold);
void e2e_hold_release(struct e2e_hold *hold);
void e2e_hold_close(struct e2e_hold *hold); /* waits for the stream's work */

#endif
