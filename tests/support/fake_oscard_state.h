/* SPDX-License-Identifier: Apache-2.0 */
/* The inside of the fake daemon: fake_oscard.c listens and does as the test says, fake_oscard_answers.c knows the verbs. */
#ifndef OSCAR_TESTS_FAKE_OSCARD_STATE_H
#define OSCAR_TESTS_FAKE_OSCARD_STATE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/fake_oscard.h"

#define MAX_HELD 256U
#define MAX_SEQS 1024U
#define KEPT_TOKENS 4096U
#define CHUNKS 2U /* of each form */

#define require(condition)                                                                                             \
    ((condition) ? (void)0 : (fprintf(stderr, "fake_oscard: %s:%d: %s\n", __FILE__, __LINE__, #condition), abort()))

struct seq {
    uint32_t committed, room_pages, slot;
    uint32_t dense_page, dense_id; /* its first own page and that page's id; the others follow, reserved at once */
};

struct plan {
    fake_change *change;
    bool hold, die;
    int error;
    char cause[OSCAR_CAUSE_BYTES];
    unsigned seen;
    struct oscar_request last;
    uint32_t tokens[KEPT_TOKENS];
    uint64_t fence;
};

struct fake_oscard {
    char directory[64], socket_path[96];
    int listener, connection, stop;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;

    int window_fd, fences_fd;
    struct oscar_window_header *window;
    oscar_fence_slot *fences;
    struct oscar_geometry geometry;
    int chunk_fd[OSCAR_FORMS][CHUNKS];
    uint8_t *chunk[OSCAR_FORMS][CHUNKS];
    bool announced_dense;

    uint32_t hit, in_flight, next_dense, next_seq, queued;
    struct oscar_page_update queue[64];
    struct seq seqs[MAX_SEQS];
    struct plan plans[OSCAR_VERBS];
    unsigned held;
    struct oscar_request held_requests[MAX_HELD];
};

int fake_memfd(const char *name, size_t bytes, void **ret);
uint64_t fake_page_bytes(const struct fake_oscard *fake, unsigned form);
uint32_t fake_least(uint32_t a, uint32_t b);

/* With the lock. */
void fake_send_record(struct fake_oscard *fake, enum oscar_record_kind kind, const void *bytes, size_t size,
                      const int *fd, unsigned fds);
void fake_send_reply(struct fake_oscard *fake, const struct oscar_reply *reply, const int *fd, unsigned fds);
void fake_send_chunks(struct fake_oscard *fake, const struct oscar_chunk_info *info, bool gone);
void fake_take_request(struct fake_oscard *fake, const struct oscar_request *request);
void fake_answer(struct fake_oscard *fake, const struct oscar_request *request);

#endif
