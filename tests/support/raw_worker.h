/* SPDX-License-Identifier: Apache-2.0 */
/* A worker that speaks the raw protocol: a greeted connection with its window mapped. Checks as it goes, with cmocka.
 * */
#ifndef OSCAR_TESTS_SUPPORT_RAW_WORKER_H
#define OSCAR_TESTS_SUPPORT_RAW_WORKER_H

#include "oscar/device.h"

#include "tests/support/daemon.h"
#include "tests/support/peer.h"

#define RAW_WORKER_PAGES 8U /* that raw_worker_fill() fills */

struct raw_worker {
    int fd;
    uint64_t last_id;
    uint8_t *window;
    oscar_fence_slot *fences;
    unsigned notices, chunks, writable; /* seen so far */
};

void raw_worker_open(const struct test_daemon *daemon, struct raw_worker *worker);
void raw_worker_close(struct raw_worker *worker);

/* Sends a request and reads until its reply, whose descriptors are the caller's (peer_close_fds). Chunks that come
 * before are checked and counted. */
void raw_worker_call(struct raw_worker *worker, struct oscar_request *request, struct peer_record *ret_record);

/* A small model: 2 layers, 2 KV heads of 64 dims. */
struct oscar_request raw_worker_model_request(const char *calibration);
uint64_t raw_worker_open_model(struct raw_worker *worker, const char *calibration);

/* Consecutive token ids into the window. */
void raw_worker_put_tokens(struct raw_worker *worker, uint32_t first, uint32_t count);
/* Opens a sequence, advances it over RAW_WORKER_PAGES pages and asks until they are sealed. */
uint64_t raw_worker_fill(struct raw_worker *worker, uint64_t model, uint32_t first_token);

#endif
