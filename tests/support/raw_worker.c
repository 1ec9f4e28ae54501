/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/raw_worker.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/window.h"
#include "tests/support/cmocka_order.h"

#define SEAL_SECONDS 20

void raw_worker_open(const struct test_daemon *daemon, struct raw_worker *worker) {
    *worker = (struct raw_worker){.fd = peer_connect(daemon->socket), .last_id = 1};
    assert_true(worker->fd >= 0);
    struct oscar_request request = peer_hello_request(1, "worker");
    struct peer_record record;
    assert_true(peer_send_request(worker->fd, &request));
    assert_true(peer_receive(worker->fd, &record));
    assert_int_equal(record.fds, 2);
    worker->window = mmap(NULL, OSCAR_WINDOW_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, record.fd[0], 0);
    worker->fences = mmap(NULL, OSCAR_FENCE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, record.fd[1], 0);
    assert_true(worker->window != MAP_FAILED && worker->fences != MAP_FAILED);
    peer_close_fds(&record);
}

void raw_worker_close(struct raw_worker *worker) {
    assert_int_equal(munmap(worker->window, OSCAR_WINDOW_BYTES), 0);
    assert_int_equal(munmap(worker->fences, OSCAR_FENCE_BYTES), 0);
    close(worker->fd);
}

void raw_worker_call(struct raw_worker *worker, struct oscar_request *request, struct peer_record *ret_record) {
    request->id = ++worker->last_id;
    assert_true(peer_send_request(worker->fd, request));
    for (;;) {
        assert_true(peer_receive(worker->fd, ret_record));
        if (ret_record->kind == OSCAR_RECORD_REPLY)
            break;
        worker->notices++;
        if (ret_record->notice.kind == OSCAR_NOTICE_CHUNKS) {
            assert_int_equal(ret_record->notice.chunks, ret_record->fds);
            for (uint32_t i = 0; i < ret_record->fds; i++) {
                struct stat status;
                const struct oscar_chunk_info *info = &ret_record->notice.chunk[i];
                assert_int_equal(fstat(ret_record->fd[i], &status), 0);
                assert_int_equal(status.st_size, info->bytes);
                worker->chunks++;
                worker->writable += info->writable;
            }
        }
        peer_close_fds(ret_record);
    }
    assert_int_equal(ret_record->reply.id, request->id);
    assert_int_equal(ret_record->reply.verb, request->verb);
}

struct oscar_request raw_worker_model_request(const char *calibration) {
    struct oscar_request request = {.verb = OSCAR_MODEL_OPEN};
    struct oscar_identity *identity = &request.model_open.identity;
    identity->format = OSCAR_IDENTITY_FORMAT;
    memset(identity->weights.bytes, 1, OSCAR_DIGEST_BYTES);
    memset(identity->rope.bytes, 2, OSCAR_DIGEST_BYTES);
    snprintf(identity->revision, sizeof(identity->revision), "main");
    snprintf(identity->adapter, sizeof(identity->adapter), "none");
    identity->geometry = (struct oscar_geometry){.layers = 2,
                                                 .query_heads = 4,
                                                 .kv_heads = 2,
                                                 .head_dim = 64,
                                                 .dtype = OSCAR_BF16,
                                                 .page_tokens = OSCAR_PAGE_TOKENS,
                                                 .sink_tokens = OSCAR_SINK_TOKENS,
                                                 .recent_tokens = OSCAR_RECENT_TOKENS};
    identity->layout = OSCAR_LAYOUT_ID;
    identity->shard_size = 1;
    snprintf(request.model_open.calibration, sizeof(request.model_open.calibration), "%s", calibration);
    return request;
}

uint64_t raw_worker_open_model(struct raw_worker *worker, const char *calibration) {
    struct oscar_request request = raw_worker_model_request(calibration);
    struct peer_record record;
    raw_worker_call(worker, &request, &record);
    if (record.reply.error != 0)
        fail_msg("%s", record.reply.cause);
    peer_close_fds(&record);
    return record.reply.model_open.model;
}

void raw_worker_put_tokens(struct raw_worker *worker, uint32_t first, uint32_t count) {
    uint32_t *tokens = (uint32_t *)(void *)(worker->window + OSCAR_WINDOW_TOKENS_OFFSET);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = first + i;
}

uint64_t raw_worker_fill(struct raw_worker *worker, uint64_t model, uint32_t first_token) {
    struct peer_record record;
    struct oscar_request open = {.verb = OSCAR_SEQ_OPEN,
                                 .seq_open = {.model = model, .tokens = RAW_WORKER_PAGES * 64 + 1}};
    raw_worker_put_tokens(worker, first_token, RAW_WORKER_PAGES * 64 + 1);
    raw_worker_call(worker, &open, &record);
    assert_int_equal(record.reply.error, 0);
    assert_int_equal(record.reply.seq_open.hit_tokens, 0);
    uint64_t seq = record.reply.seq_open.seq;
    uint32_t slot = record.reply.seq_open.fence_slot;
    struct oscar_request reserve = {.verb = OSCAR_SEQ_RESERVE,
                                    .seq_reserve = {.seq = seq, .tokens = RAW_WORKER_PAGES * 64 + 1}};
    raw_worker_call(worker, &reserve, &record);
    assert_int_equal(record.reply.error, 0);
    assert_true(record.reply.seq_reserve.updates > 0);
    assert_true(worker->writable > 0); /* announced before the reply whose updates refer to it */
    raw_worker_put_tokens(worker, first_token, RAW_WORKER_PAGES * 64);
    struct oscar_request advance = {.verb = OSCAR_SEQ_ADVANCE,
                                    .seq_advance = {.seq = seq, .tokens = RAW_WORKER_PAGES * 64, .fence = 2}};
    raw_worker_call(worker, &advance, &record);
    assert_int_equal(record.reply.error, 0);
    assert_int_equal(record.reply.seq_advance.committed_tokens, RAW_WORKER_PAGES * 64);
    __atomic_store_n((uint64_t *)&worker->fences[slot], 3, __ATOMIC_RELEASE);
    time_t end = time(NULL) + SEAL_SECONDS;
    for (uint64_t fence = 4; record.reply.seq_advance.sealed_tokens < RAW_WORKER_PAGES * 64; fence += 2) {
        assert_true(time(NULL) < end);
        struct oscar_request again = {.verb = OSCAR_SEQ_ADVANCE, .seq_advance = {.seq = seq, .fence = fence}};
        raw_worker_call(worker, &again, &record);
        assert_int_equal(record.reply.error, 0);
        __atomic_store_n((uint64_t *)&worker->fences[slot], fence + 1, __ATOMIC_RELEASE);
    }
    return seq;
}
