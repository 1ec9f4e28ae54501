/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/store_rig.h"

#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "proto/geometry.h"

#define PATIENCE_MS 30000 /* with the device, on a busy machine */

static void on_announce(void *arg, void *client_arg, const struct oscar_chunk_info *info, int fd) {
    (void)arg;
    struct rig_client *client = client_arg;
    assert_true(fd >= 0);
    assert_true(info->index < RIG_MAX_CHUNKS);
    assert_int_not_equal(client->known[info->form][info->index], info->generation);
    client->known[info->form][info->index] = info->generation;
    client->writable[info->form][info->index] = info->writable;
}

static void on_gone(void *arg, void *client_arg, const struct oscar_chunk_info *info) {
    (void)arg;
    struct rig_client *client = client_arg;
    assert_int_equal(client->known[info->form][info->index], info->generation);
    client->known[info->form][info->index] = 0;
    client->chunks_gone++;
}

static void on_done(void *arg, void *client_arg, uint64_t request_id, const struct oscar_reply *reply) {
    (void)arg;
    struct rig_client *client = client_arg;
    assert_true(client->answers < 64);
    client->answer[client->answers++] = (struct rig_answer){.id = request_id, .reply = *reply};
}

static void on_over(void *arg, void *client_arg) {
    (void)client_arg;
    ((struct rig *)arg)->clients_over++;
}

static void on_models_changed(void *arg) { ((struct rig *)arg)->models_changed++; }

static void on_device_failed(void *arg, const struct oscar_cause *cause) {
    assert_true(cause->text[0] != 0);
    ((struct rig *)arg)->device_failures++;
}

static void on_event(void *arg, const struct oscar_event *event) {
    struct rig *rig = arg;
    assert_true(rig->events < RIG_MAX_EVENTS);
    rig->event[rig->events++] = *event;
}

void rig_open(struct rig *rig, const struct rig_options *options) {
    *rig = (struct rig){.verify = true};
    fake_device_init(&rig->device);
    rig->event = calloc(RIG_MAX_EVENTS, sizeof *rig->event);
    rig->identity = (struct oscar_identity){
        .format = OSCAR_IDENTITY_FORMAT,
        .weights.bytes = {1},
        .revision = "main",
        .geometry = {.layers = 1,
                     .query_heads = 1,
                     .kv_heads = 1,
                     .head_dim = 64,
                     .dtype = OSCAR_BF16,
                     .page_tokens = OSCAR_PAGE_TOKENS,
                     .sink_tokens = OSCAR_SINK_TOKENS,
                     .recent_tokens = OSCAR_RECENT_TOKENS},
        .rope.bytes = {2},
        .calibration.bytes = {3},
        .layout = OSCAR_LAYOUT_ID,
        .shard_size = 1,
        .adapter = "none",
        .tenant = "test",
    };
    uint64_t page = oscar_dense_page_bytes(&rig->identity.geometry);
    const struct store_options store_options = {
        .ops = fake_device_ops(),
        .device = &rig->device,
        .budget_bytes = page * (options->budget_pages ? options->budget_pages : 4096),
        .packed_chunk_bytes = page * (options->chunk_pages ? options->chunk_pages : 8),
        .dense_chunk_bytes = page * (options->chunk_pages ? options->chunk_pages : 8),
        .pack_threads = options->threads ? options->threads : 2,
        .max_sequences = options->max_sequences ? options->max_sequences : 4096,
        .max_leases = options->max_leases ? options->max_leases : 4096,
        .hash_seed = 42,
        .hash_collide = options->hash_collide,
        .hooks = {.arg = rig,
                  .chunk_announce = on_announce,
                  .chunk_gone = on_gone,
                  .waiter_done = on_done,
                  .client_over = on_over,
                  .event = on_event,
                  .models_changed = on_models_changed,
                  .device_failed = on_device_failed},
    };
    struct oscar_cause cause = {0};
    if (store_new(&store_options, &rig->store, &cause) < 0)
        fail_msg("store_new: %s", cause.text);
}

void rig_close(struct rig *rig) {
    store_free(rig->store);
    assert_int_equal(rig->clients_over, rig->clients);
    assert_int_equal(rig->device.chunks, 0);
    assert_int_equal(rig->device.bytes, 0);
    assert_int_equal(rig->device.calibrations, 0);
    assert_int_equal(rig->device.streams, 0);
    fake_device_fini(&rig->device);
    free(rig->event);
}

void rig_verify(const struct rig *rig) {
    struct oscar_cause cause = {0};
    if (rig->verify && store_verify(rig->store, &cause) < 0)
        fail_msg("store_verify: %s", cause.text);
}

void rig_poll(struct rig *rig) {
    store_poll(rig->store, rig->now_ns);
    rig_verify(rig);
}

void rig_settle(struct rig *rig) {
    bool verify = rig->verify;
    rig->verify = false;
    for (;;) {
        rig_poll(rig);
        pool_wait(rig->store->pool);
        struct pollfd event = {.fd = store_event_fd(rig->store), .events = POLLIN};
        if (poll(&event, 1, 0) == 0)
            break;
    }
    rig->verify = verify;
    rig_verify(rig);
}

uint64_t rig_metric(const struct rig *rig, const char *name, const char *labels) {
    static struct oscar_metric metric[OSCAR_MAX_METRICS];
    uint32_t count = store_metrics(rig->store, metric, OSCAR_MAX_METRICS);
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(metric[i].name, name) == 0 && strcmp(metric[i].labels, labels) == 0)
            return metric[i].value;
    fail_msg("no metric %s{%s}", name, labels);
    return 0;
}

/* The pool's next event, and a poll for it. */
static void wait_and_poll(struct rig *rig) {
    struct pollfd event = {.fd = store_event_fd(rig->store), .events = POLLIN};
    int r;
    do /* a fuzzer has signals of its own */
        r = poll(&event, 1, PATIENCE_MS);
    while (r < 0 && errno == EINTR);
    assert_int_equal(r, 1);
    rig_poll(rig);
}

int rig_model_open(struct rig_client *client, const struct oscar_identity *identity,
                   struct oscar_calibration *calibration, struct oscar_reply *ret, struct oscar_cause *cause) {
    struct rig *rig = client->rig;
    int fd[2], r;
    unsigned fds;
    while ((r = store_model_open(rig->store, client->client, identity, calibration, -1, -1, ret, fd, &fds, cause)) ==
           OSCAR_PARKED) {
        calibration = NULL;
        for (uint32_t before = rig->models_changed; rig->models_changed == before;)
            wait_and_poll(rig);
    }
    return r;
}

struct rig_client *rig_client_new(struct rig *rig, const char *group_key) {
    struct rig_client *client = calloc(1, sizeof *client);
    client->rig = rig;
    rig->clients++;
    client->window =
        mmap(NULL, OSCAR_WINDOW_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    client->fences = calloc(OSCAR_FENCE_SLOTS, sizeof *client->fences);
    assert_int_equal(store_client_new(rig->store, client, client->window, client->fences, group_key, &client->client),
                     0);

    struct oscar_calibration *calibration = NULL;
    struct oscar_digest digest;
    oscar_model_digest(&rig->identity, &digest);
    if (!model_find(rig->store, &digest)) /* a known model may come without one */
        assert_int_equal(oscar_calibration_default(&rig->identity.geometry, &calibration, NULL), 0);
    struct oscar_reply reply = {0};
    struct oscar_cause cause = {0};
    if (rig_model_open(client, &rig->identity, calibration, &reply, &cause) < 0)
        fail_msg("store_model_open: %s", cause.text);
    client->model = reply.model_open.model;
    client->digest = reply.model_open.model_digest;
    rig_verify(rig);
    return client;
}

void rig_client_gone(struct rig_client *client) {
    store_client_gone(client->rig->store, client->client);
    rig_verify(client->rig);
}

void rig_client_exited(struct rig_client *client) {
    store_client_exited(client->rig->store, client->client);
    rig_verify(client->rig);
    rig_client_forget(client);
}

void rig_client_forget(struct rig_client *client) {
    (void)munmap(client->window, OSCAR_WINDOW_BYTES);
    free(client->fences);
    free(client);
}

void rig_client_free(struct rig_client *client) {
    rig_client_gone(client);
    rig_client_exited(client);
}

const struct oscar_reply *rig_answered(const struct rig_client *client, uint64_t id) {
    for (uint32_t i = 0; i < client->answers; i++)
        if (client->answer[i].id == (id ? id : client->request_id))
            return &client->answer[i].reply;
    return NULL;
}

/* What was parked for memory alone is answered as soon as the device has given it. */
static int answer_of_memory(struct rig_client *client, struct oscar_reply *ret, struct oscar_cause *cause) {
    const struct oscar_reply *answer = NULL;
    while (!answer && memory_moves(&client->rig->store->memory)) {
        wait_and_poll(client->rig);
        answer = rig_answered(client, 0);
    }
    if (!answer)
        return OSCAR_PARKED;
    client->answers--; /* the last one */
    memcpy(cause->text, answer->cause, sizeof answer->cause);
    if (answer->error == 0)
        *ret = *answer;
    return answer->error;
}

int rig_request(struct rig_client *client, struct oscar_request *request, struct oscar_reply *ret) {
    request->id = ++client->request_id;
    struct oscar_cause cause = {0};
    int r = store_request(client->rig->store, client->client, request, client->rig->now_ns, ret, &cause);
    if (r == OSCAR_PARKED && !client->rig->patient)
        r = answer_of_memory(client, ret, &cause);
    assert_true((r < 0) == (cause.text[0] != 0));
    if (r == 0) {
        assert_int_equal(ret->id, request->id);
        assert_int_equal(ret->verb, request->verb);
    }
    rig_verify(client->rig);
    return r;
}

static void put_tokens(struct rig_client *client, const uint32_t *tokens, uint32_t count) {
    if (count > 0 && count <= OSCAR_MAX_SEQUENCE_TOKENS)
        memcpy(client->window + OSCAR_WINDOW_TOKENS_OFFSET, tokens, count * sizeof *tokens);
}

static const struct arena *arena_of(const struct rig_client *client, oscar_page_ref ref) {
    int error;
    const struct store_model *model = handle_get(&client->rig->store->models, client->model, &error);
    return &model->arena[oscar_page_ref_form(ref)];
}

static uint32_t chunk_index(const struct rig_client *client, oscar_page_ref ref) {
    return (uint32_t)oscar_page_ref_id(ref) / arena_of(client, ref)->shape.chunk_pages;
}

uint8_t *rig_address(struct rig_client *client, oscar_page_ref ref) {
    enum oscar_form form = oscar_page_ref_form(ref);
    const struct arena *arena = arena_of(client, ref);
    uint32_t slot = (uint32_t)oscar_page_ref_id(ref), index = chunk_index(client, ref);
    assert_true(ref >> 63);
    assert_true(index < arena->capacity);
    if (!arena->chunk[index])
        fail_msg("page reference 0x%llx: no chunk is there", (unsigned long long)ref);
    /* The client was told of exactly this chunk. */
    assert_int_equal(client->known[form][index], arena->chunk[index]->generation);
    return arena_address(arena, slot);
}

/* Takes the updates of a reply over; what they replace is read until the counter has passed `fence`. */
static void take_updates(struct rig_seq *seq, uint32_t count, uint64_t fence) {
    const struct oscar_page_update *update = (const void *)(seq->client->window + OSCAR_WINDOW_UPDATES_OFFSET);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t page = update[i].page;
        assert_true(page <= seq->pages);
        assert_int_equal(update[i].reserved, 0);
        (void)rig_address(seq->client, update[i].ref);
        if (page == seq->pages) {
            seq->page = realloc(seq->page, ++seq->pages * sizeof *seq->page);
        } else {
            assert_int_not_equal(seq->page[page], update[i].ref);
            seq->stale = realloc(seq->stale, (seq->stales + 1) * sizeof *seq->stale);
            seq->stale[seq->stales++] = (struct rig_stale){.page = page, .ref = seq->page[page], .fence = fence};
        }
        seq->page[page] = update[i].ref;
    }
}

static void keep_tokens(struct rig_seq *seq, const uint32_t *tokens, uint32_t from, uint32_t count) {
    if (seq->tags > from / OSCAR_PAGE_TOKENS)
        seq->tags = from / OSCAR_PAGE_TOKENS;
    seq->tokens = realloc(seq->tokens, (from + count + 1) * sizeof *seq->tokens);
    if (count > 0)
        memcpy(seq->tokens + from, tokens, count * sizeof *tokens);
}

/* What page `page` of the sequence must hold: it follows from the tokens up to its end. */
static const struct oscar_digest *page_tag(struct rig_seq *seq, uint32_t page) {
    if (page >= seq->tags) {
        seq->tag = realloc(seq->tag, (page + 1) * sizeof *seq->tag);
        for (; seq->tags <= page; seq->tags++) {
            struct oscar_digest *tag = &seq->tag[seq->tags];
            oscar_chain_digest(seq->tags ? tag - 1 : &seq->client->digest,
                               seq->tokens + (size_t)seq->tags * OSCAR_PAGE_TOKENS, tag);
            tag->bytes[0] &= 0x7f; /* never FAKE_NOT_FINITE */
        }
    }
    return &seq->tag[page];
}

int rig_seq_open(struct rig_client *client, const uint32_t *tokens, uint32_t count, bool dense_tail,
                 struct rig_seq **ret) {
    put_tokens(client, tokens, count);
    struct oscar_request request = {.verb = OSCAR_SEQ_OPEN, .seq_open = {client->model, count, dense_tail}};
    struct oscar_reply reply = {0};
    int r = rig_request(client, &request, &reply);
    if (r < 0)
        return r;
    struct rig_seq *seq = calloc(1, sizeof *seq);
    seq->client = client;
    seq->handle = reply.seq_open.seq;
    seq->fence_slot = reply.seq_open.fence_slot;
    seq->committed = seq->reserved = reply.seq_open.hit_tokens;
    seq->in_flight = reply.seq_open.in_flight_tokens;
    assert_true(seq->committed <= count && seq->committed % OSCAR_PAGE_TOKENS == 0);
    assert_true(seq->in_flight >= seq->committed);
    assert_int_equal(reply.seq_open.updates, seq->committed / OSCAR_PAGE_TOKENS);
    assert_int_equal(client->fences[seq->fence_slot], 0);
    keep_tokens(seq, tokens, 0, count);
    take_updates(seq, reply.seq_open.updates, 1);
    *ret = seq;
    return 0;
}

int rig_seq_extend(struct rig_seq *seq, const uint32_t *tokens, uint32_t count) {
    put_tokens(seq->client, tokens, count);
    struct oscar_request request = {.verb = OSCAR_SEQ_EXTEND, .seq_extend = {seq->handle, count, seq->fence + 2}};
    struct oscar_reply reply = {0};
    int r = rig_request(seq->client, &request, &reply);
    if (r < 0)
        return r;
    seq->fence += 2;
    seq->committed = seq->reserved = reply.seq_extend.hit_tokens;
    seq->in_flight = reply.seq_extend.in_flight_tokens;
    keep_tokens(seq, tokens, 0, count);
    take_updates(seq, reply.seq_extend.updates, seq->fence + 1);
    assert_int_equal(seq->pages * OSCAR_PAGE_TOKENS, seq->committed);
    return 0;
}

int rig_seq_reserve(struct rig_seq *seq, uint32_t tokens) {
    struct oscar_request request = {.verb = OSCAR_SEQ_RESERVE, .seq_reserve = {seq->handle, tokens}};
    struct oscar_reply reply = {0};
    int r = rig_request(seq->client, &request, &reply);
    if (r != 0)
        return r;
    uint32_t before = seq->pages;
    seq->reserved = reply.seq_reserve.reserved_tokens;
    assert_true(seq->reserved >= seq->committed + tokens);
    take_updates(seq, reply.seq_reserve.updates, 0);
    assert_int_equal(seq->pages * OSCAR_PAGE_TOKENS, seq->reserved);
    for (uint32_t page = before; page < seq->pages; page++) {
        assert_int_equal(rig_seq_form(seq, page), OSCAR_FORM_DENSE);
        assert_true(seq->client->writable[OSCAR_FORM_DENSE][chunk_index(seq->client, seq->page[page])]);
        /* What was there before must not be taken for a page of ours. */
        memset(rig_address(seq->client, seq->page[page]), 0, FAKE_TAG_BYTES);
    }
    return 0;
}

int rig_seq_advance(struct rig_seq *seq, const uint32_t *tokens, uint32_t count) {
    put_tokens(seq->client, tokens, count);
    struct oscar_request request = {.verb = OSCAR_SEQ_ADVANCE, .seq_advance = {seq->handle, count, seq->fence + 2}};
    struct oscar_reply reply = {0};
    if (seq->committed + count <= seq->pages * OSCAR_PAGE_TOKENS) {
        keep_tokens(seq, tokens, seq->committed, count);
        for (uint32_t page = seq->committed / OSCAR_PAGE_TOKENS; page < (seq->committed + count) / OSCAR_PAGE_TOKENS;
             page++) {
            memcpy(rig_address(seq->client, seq->page[page]), page_tag(seq, page), FAKE_TAG_BYTES);
        }
    }
    int r = rig_request(seq->client, &request, &reply);
    if (r < 0)
        return r;
    seq->fence += 2;
    seq->committed += count;
    assert_int_equal(reply.seq_advance.committed_tokens, seq->committed);
    seq->sealed = reply.seq_advance.sealed_tokens;
    take_updates(seq, reply.seq_advance.updates, seq->fence + 1);
    return 0;
}

void rig_seq_signal(struct rig_seq *seq) {
    atomic_store(&seq->client->fences[seq->fence_slot], seq->fence + 1);
    seq->stales = 0;
}

int rig_seq_compute(struct rig_seq *seq, const uint32_t *tokens, uint32_t count) {
    int r = rig_seq_reserve(seq, count);
    if (r == 0)
        r = rig_seq_advance(seq, tokens, count);
    if (r != 0)
        return r;
    rig_seq_signal(seq);
    rig_settle(seq->client->rig);
    return 0;
}

struct rig_seq *rig_seq_forked(struct rig_seq *parent, const struct oscar_reply *reply) {
    struct rig_seq *seq = calloc(1, sizeof *seq);
    seq->client = parent->client;
    seq->handle = reply->seq_fork.seq;
    seq->fence_slot = reply->seq_fork.fence_slot;
    seq->committed = reply->seq_fork.committed_tokens;
    assert_int_equal(seq->committed, parent->committed);
    keep_tokens(seq, parent->tokens, 0, parent->committed);
    take_updates(seq, reply->seq_fork.updates, 1);
    seq->reserved = seq->pages * OSCAR_PAGE_TOKENS;
    assert_int_equal(seq->pages, (seq->committed + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS);
    assert_true(reply->seq_fork.copies <= 5);
    for (uint32_t i = 0; i < reply->seq_fork.copies; i++) {
        const struct oscar_page_copy *copy = &reply->seq_fork.copy[i];
        assert_int_equal(copy->from, parent->page[copy->page]);
        assert_int_equal(copy->to, seq->page[copy->page]);
        assert_true(copy->rows > 0 && copy->rows <= OSCAR_PAGE_TOKENS);
        memcpy(rig_address(seq->client, copy->to), rig_address(seq->client, copy->from), FAKE_TAG_BYTES);
    }
    return seq;
}

int rig_seq_wait(struct rig_seq *seq, uint32_t timeout_ms, uint32_t *ret_available) {
    struct oscar_request request = {.verb = OSCAR_SEQ_WAIT, .seq_wait = {seq->handle, timeout_ms}};
    struct oscar_reply reply = {0};
    int r = rig_request(seq->client, &request, &reply);
    if (r == 0)
        *ret_available = reply.seq_wait.available_tokens;
    return r;
}

int rig_seq_fork(struct rig_seq *seq, struct rig_seq **ret) {
    struct oscar_request request = {.verb = OSCAR_SEQ_FORK, .seq_fork = {seq->handle, seq->fence + 2}};
    struct oscar_reply reply = {0};
    int r = rig_request(seq->client, &request, &reply);
    if (r < 0)
        return r;
    seq->fence += 2;
    if (r == 0)
        *ret = rig_seq_forked(seq, &reply);
    return r;
}

void rig_seq_close(struct rig_seq *seq, bool signal) {
    struct oscar_request request = {.verb = OSCAR_SEQ_CLOSE, .seq_close = {seq->handle, seq->fence + 2}};
    struct oscar_reply reply = {0};
    assert_int_equal(rig_request(seq->client, &request, &reply), 0);
    seq->fence += 2;
    if (signal)
        atomic_store(&seq->client->fences[seq->fence_slot], seq->fence);
    rig_seq_forget(seq);
}

void rig_seq_forget(struct rig_seq *seq) {
    free(seq->tokens);
    free(seq->page);
    free(seq->stale);
    free(seq->tag);
    free(seq);
}

enum oscar_form rig_seq_form(const struct rig_seq *seq, uint32_t page) {
    assert_true(page < seq->pages);
    return oscar_page_ref_form(seq->page[page]);
}

void rig_seq_check(struct rig_seq *seq) {
    uint32_t full = seq->committed / OSCAR_PAGE_TOKENS;
    for (uint32_t page = 0; page < full; page++)
        if (memcmp(rig_address(seq->client, seq->page[page]), page_tag(seq, page), FAKE_TAG_BYTES) != 0)
            fail_msg("page %u of sequence 0x%llx holds another page", page, (unsigned long long)seq->handle);
    for (uint32_t i = 0; i < seq->stales; i++)
        if (seq->stale[i].page < full &&
            memcmp(rig_address(seq->client, seq->stale[i].ref), page_tag(seq, seq->stale[i].page), FAKE_TAG_BYTES) != 0)
            fail_msg("page %u of sequence 0x%llx was reused under a reader", seq->stale[i].page,
                     (unsigned long long)seq->handle);
}

uint32_t rig_probe(struct rig_client *client, const uint32_t *tokens, uint32_t count) {
    put_tokens(client, tokens, count);
    struct oscar_request request = {.verb = OSCAR_PROBE, .probe = {client->model, count, false}};
    struct oscar_reply reply = {0};
    assert_int_equal(rig_request(client, &request, &reply), 0);
    return reply.probe.hit_tokens;
}

void rig_cache(struct rig_client *client, const uint32_t *tokens, uint32_t pages) {
    struct rig_seq *seq;
    assert_int_equal(rig_seq_open(client, tokens, pages * OSCAR_PAGE_TOKENS, false, &seq), 0);
    uint32_t hit = seq->committed;
    assert_int_equal(rig_seq_compute(seq, tokens + hit, pages * OSCAR_PAGE_TOKENS - hit), 0);
    rig_seq_close(seq, true);
    rig_settle(client->rig);
}

void rig_tokens(uint32_t seed, uint32_t from, uint32_t count, uint32_t *ret) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t x = ((uint64_t)seed << 32 | (from + i)) * UINT64_C(0x9e3779b97f4a7c15);
        ret[i] = (uint32_t)((x ^ x >> 29) >> 32);
    }
}
