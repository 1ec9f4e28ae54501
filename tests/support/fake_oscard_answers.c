/* SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "proto/calibration.h"
#include "proto/geometry.h"
#include "proto/version.h"
#include "tests/support/fake_oscard_state.h"

static void answer_hello(struct oscar_reply *reply) {
    reply->hello.major = OSCAR_PROTOCOL_MAJOR;
    reply->hello.minor = OSCAR_PROTOCOL_MINOR;
    reply->hello.incarnation = 42;
    reply->hello.session = 1;
    reply->hello.window_bytes = OSCAR_WINDOW_BYTES;
    reply->hello.fence_bytes = OSCAR_FENCE_BYTES;
    strcpy(reply->hello.backend, "host");
    strcpy(reply->hello.device, "host");
    strcpy(reply->hello.tenant, "default");
    strcpy(reply->hello.version, "fake");
}

static void make_chunks(struct fake_oscard *fake, const struct oscar_geometry *geometry) {
    if (fake->geometry.layers != 0)
        return;
    fake->geometry = *geometry;
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        for (unsigned i = 0; i < CHUNKS; i++) {
            void *memory;
            fake->chunk_fd[form][i] = fake_memfd("fake-chunk", FAKE_CHUNK_PAGES * fake_page_bytes(fake, form), &memory);
            fake->chunk[form][i] = memory;
        }
}

/* Behind the reply to MODEL_OPEN. */
static void send_shared_chunks(struct fake_oscard *fake) {
    struct oscar_chunk_info info = fake_oscard_chunk(fake, OSCAR_FORM_SINK, 0);
    fake_send_chunks(fake, &info, false);
    info = fake_oscard_chunk(fake, OSCAR_FORM_PACKED, 0);
    fake_send_chunks(fake, &info, false);
}

static void answer_model_open(struct fake_oscard *fake, const struct oscar_request *request,
                              struct oscar_reply *reply) {
    make_chunks(fake, &request->model_open.identity.geometry);
    fake->announced_dense = false;

    struct oscar_calibration *calibration;
    require(oscar_calibration_default(&fake->geometry, &calibration, NULL) == 0);
    reply->model_open.model = FAKE_MODEL;
    memset(&reply->model_open.model_digest, 0x11, sizeof(reply->model_open.model_digest));
    reply->model_open.calibration_digest = calibration->digest;
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        reply->model_open.arenas[form] = (struct oscar_arena_info){
            .page_bytes = fake_page_bytes(fake, form), .chunk_pages = FAKE_CHUNK_PAGES, .max_pages = FAKE_MAX_PAGES};
    oscar_calibration_free(calibration);
}

static struct seq *new_seq(struct fake_oscard *fake, uint64_t *ret_handle, uint32_t *ret_slot) {
    require(fake->next_seq < MAX_SEQS);
    uint32_t index = fake->next_seq++;
    *ret_handle = (UINT64_C(1) << 32) | index;
    *ret_slot = index;
    atomic_store(&fake->fences[index], 0);
    fake->seqs[index] = (struct seq){.slot = index};
    return &fake->seqs[index];
}

/* Sink for page 0 and packed pages behind it. */
static uint32_t hit_updates(uint32_t from, uint32_t to, struct oscar_page_update *ret) {
    for (uint32_t page = from; page < to; page++)
        ret[page - from] = (struct oscar_page_update){
            .page = page, .ref = oscar_page_ref_make(page == 0 ? OSCAR_FORM_SINK : OSCAR_FORM_PACKED, page)};
    return to - from;
}

static uint32_t whole(uint32_t tokens) { return tokens / OSCAR_PAGE_TOKENS; }

static void answer_seq_open(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    struct seq *seq = new_seq(fake, &reply->seq_open.seq, &reply->seq_open.fence_slot);
    uint32_t most = whole(request->seq_open.tokens) * OSCAR_PAGE_TOKENS;
    seq->committed = fake_least(fake->hit, most);
    seq->room_pages = whole(seq->committed);
    reply->seq_open.hit_tokens = seq->committed;
    reply->seq_open.in_flight_tokens = fake_least(fake->in_flight > fake->hit ? fake->in_flight : fake->hit, most);
    reply->seq_open.updates = hit_updates(0, seq->room_pages, fake_oscard_updates(fake));
}

static void answer_seq_extend(struct fake_oscard *fake, struct seq *seq, const struct oscar_request *request,
                              struct oscar_reply *reply) {
    uint32_t before = whole(seq->committed), most = whole(request->seq_extend.tokens) * OSCAR_PAGE_TOKENS;
    seq->committed = fake_least(fake->hit, most);
    seq->room_pages = whole(seq->committed);
    reply->seq_extend.hit_tokens = seq->committed;
    reply->seq_extend.in_flight_tokens = fake_least(fake->in_flight > fake->hit ? fake->in_flight : fake->hit, most);
    reply->seq_extend.updates = hit_updates(before, seq->room_pages, fake_oscard_updates(fake));
}

static void announce_dense(struct fake_oscard *fake) {
    for (uint32_t i = 0; i < CHUNKS && !fake->announced_dense; i++) {
        struct oscar_chunk_info info = fake_oscard_chunk(fake, OSCAR_FORM_DENSE, i);
        fake_send_chunks(fake, &info, false);
    }
    fake->announced_dense = true;
}

static uint32_t next_dense(struct fake_oscard *fake) {
    require(fake->next_dense < CHUNKS * FAKE_CHUNK_PAGES);
    return fake->next_dense++;
}

static void answer_seq_reserve(struct fake_oscard *fake, struct seq *seq, const struct oscar_request *request,
                               struct oscar_reply *reply) {
    uint32_t pages = (seq->committed + request->seq_reserve.tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    announce_dense(fake);
    if (seq->dense_page == 0 && seq->dense_id == 0) {
        seq->dense_page = seq->room_pages;
        seq->dense_id = fake->next_dense;
    }
    for (; seq->room_pages < pages; seq->room_pages++)
        fake_oscard_updates(fake)[reply->seq_reserve.updates++] = (struct oscar_page_update){
            .page = seq->room_pages, .ref = oscar_page_ref_make(OSCAR_FORM_DENSE, next_dense(fake))};
    reply->seq_reserve.reserved_tokens = seq->room_pages * OSCAR_PAGE_TOKENS;
}

static void answer_seq_advance(struct fake_oscard *fake, struct seq *seq, const struct oscar_request *request,
                               struct oscar_reply *reply) {
    seq->committed += request->seq_advance.tokens;
    reply->seq_advance.committed_tokens = seq->committed;
    reply->seq_advance.sealed_tokens = whole(seq->committed) * OSCAR_PAGE_TOKENS;
    reply->seq_advance.updates = fake->queued;
    memcpy(fake_oscard_updates(fake), fake->queue, fake->queued * sizeof(fake->queue[0]));
    fake->queued = 0;
}

/* The child reads the parent's whole pages where they are, by forms that were never exchanged, and gets a tail of its own. */
static void answer_seq_fork(struct fake_oscard *fake, const struct seq *parent, struct oscar_reply *reply) {
    struct seq *child = new_seq(fake, &reply->seq_fork.seq, &reply->seq_fork.fence_slot);
    child->committed = parent->committed;
    uint32_t full = whole(parent->committed);
    reply->seq_fork.committed_tokens = parent->committed;
    reply->seq_fork.updates = hit_updates(0, full, fake_oscard_updates(fake));
    child->room_pages = full;
    if (parent->committed % OSCAR_PAGE_TOKENS == 0)
        return;
    oscar_page_ref to = oscar_page_ref_make(OSCAR_FORM_DENSE, next_dense(fake));
    fake_oscard_updates(fake)[reply->seq_fork.updates++] = (struct oscar_page_update){.page = full, .ref = to};
    child->room_pages = full + 1;
    reply->seq_fork.copies = 1;
    reply->seq_fork.copy[0] = (struct oscar_page_copy){
        .from = oscar_page_ref_make(OSCAR_FORM_DENSE, parent->dense_id + full - parent->dense_page),
        .to = to,
        .page = full,
        .rows = parent->committed % OSCAR_PAGE_TOKENS};
}

static uint64_t seq_of(const struct oscar_request *request) {
    switch (request->verb) {
    case OSCAR_SEQ_WAIT:
        return request->seq_wait.seq;
    case OSCAR_SEQ_EXTEND:
        return request->seq_extend.seq;
    case OSCAR_SEQ_RESERVE:
        return request->seq_reserve.seq;
    case OSCAR_SEQ_ADVANCE:
        return request->seq_advance.seq;
    case OSCAR_SEQ_FORK:
        return request->seq_fork.seq;
    case OSCAR_SEQ_CLOSE:
        return request->seq_close.seq;
    default:
        return 0;
    }
}

/* With the lock. */
void fake_answer(struct fake_oscard *fake, const struct oscar_request *request) {
    struct plan *plan = &fake->plans[request->verb];
    struct oscar_reply reply = {.id = request->id, .verb = request->verb, .error = plan->error};
    struct seq *seq = &fake->seqs[(uint32_t)seq_of(request) % MAX_SEQS];
    int fd[2] = {fake->window_fd, fake->fences_fd};
    if (plan->error < 0) {
        strcpy(reply.cause, plan->cause);
        fake_send_reply(fake, &reply, NULL, 0);
        return;
    }
    switch (request->verb) {
    case OSCAR_HELLO:
        answer_hello(&reply);
        break;
    case OSCAR_MODEL_OPEN:
        answer_model_open(fake, request, &reply);
        break;
    case OSCAR_PROBE:
        reply.probe.hit_tokens = fake_least(fake->hit, whole(request->probe.tokens) * OSCAR_PAGE_TOKENS);
        reply.probe.in_flight_tokens = reply.probe.hit_tokens;
        reply.probe.lease = request->probe.lease && reply.probe.hit_tokens > 0 ? 0x500000001 : 0;
        memset(reply.probe.secret, 0x5a, sizeof(reply.probe.secret));
        break;
    case OSCAR_LEASE_ADOPT:
        reply.lease_adopt.lease = 0x600000001;
        reply.lease_adopt.hit_tokens = fake->hit;
        break;
    case OSCAR_SEQ_OPEN:
        answer_seq_open(fake, request, &reply);
        break;
    case OSCAR_SEQ_WAIT:
        reply.seq_wait.available_tokens = fake->hit;
        break;
    case OSCAR_SEQ_EXTEND:
        answer_seq_extend(fake, seq, request, &reply);
        break;
    case OSCAR_SEQ_RESERVE:
        answer_seq_reserve(fake, seq, request, &reply);
        break;
    case OSCAR_SEQ_ADVANCE:
        answer_seq_advance(fake, seq, request, &reply);
        break;
    case OSCAR_SEQ_FORK:
        answer_seq_fork(fake, seq, &reply);
        break;
    default:
        break;
    }
    if (plan->change == NULL || plan->change(fake, request, &reply))
        fake_send_reply(fake, &reply, fd, request->verb == OSCAR_HELLO && reply.error == 0 ? 2 : 0);
    if (request->verb == OSCAR_MODEL_OPEN)
        send_shared_chunks(fake);
}

static uint32_t tokens_of(const struct oscar_request *request) {
    switch (request->verb) {
    case OSCAR_PROBE:
        return request->probe.tokens;
    case OSCAR_SEQ_OPEN:
        return request->seq_open.tokens;
    case OSCAR_SEQ_EXTEND:
        return request->seq_extend.tokens;
    case OSCAR_SEQ_ADVANCE:
        return request->seq_advance.tokens;
    default:
        return 0;
    }
}

/* With the lock. */
void fake_take_request(struct fake_oscard *fake, const struct oscar_request *request) {
    struct plan *plan = &fake->plans[request->verb];
    plan->seen++;
    plan->last = *request;
    memcpy(plan->tokens, (const char *)fake->window + OSCAR_WINDOW_TOKENS_OFFSET,
           fake_least(tokens_of(request), KEPT_TOKENS) * sizeof(uint32_t));
    plan->fence = atomic_load(&fake->fences[fake->seqs[(uint32_t)seq_of(request) % MAX_SEQS].slot]);
    pthread_cond_broadcast(&fake->changed);
    if (plan->die) {
        (void)close(fake->connection);
        fake->connection = -1;
    } else if (plan->hold) {
        require(fake->held < MAX_HELD);
        fake->held_requests[fake->held++] = *request;
    } else {
        fake_answer(fake, request);
    }
}
