/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/fake_oscard.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/calibration.h"
#include "proto/geometry.h"
#include "proto/version.h"

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

static int memfd(const char *name, size_t bytes, void **ret) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    require(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    require(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    *ret = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    require(*ret != MAP_FAILED);
    return fd;
}

static uint64_t page_bytes(const struct fake_oscard *fake, unsigned form) {
    return form == OSCAR_FORM_PACKED ? oscar_packed_page_bytes(&fake->geometry)
                                     : oscar_dense_page_bytes(&fake->geometry);
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

static void send_record(struct fake_oscard *fake, enum oscar_record_kind kind, const void *bytes, size_t size,
                        const int *fd, unsigned fds) {
    if (fake->connection >= 0)
        (void)oscar_record_send(fake->connection, kind, bytes, (uint32_t)size, fd, fds, 1000, NULL);
}

static void send_reply(struct fake_oscard *fake, const struct oscar_reply *reply, const int *fd, unsigned fds) {
    static uint8_t buffer[OSCAR_MAX_RECORD_PAYLOAD_BYTES]; /* with the lock */
    size_t bytes;
    require(oscar_reply_encode(reply, buffer, sizeof(buffer), &bytes) == 0);
    send_record(fake, OSCAR_RECORD_REPLY, buffer, bytes, fd, fds);
}

static void send_chunks(struct fake_oscard *fake, const struct oscar_chunk_info *info, bool gone) {
    uint8_t buffer[1024];
    size_t bytes;
    struct oscar_notice notice = {
        .kind = gone ? OSCAR_NOTICE_CHUNKS_GONE : OSCAR_NOTICE_CHUNKS, .chunks = 1, .chunk = {*info}};
    require(oscar_notice_encode(&notice, buffer, sizeof(buffer), &bytes) == 0);
    send_record(fake, OSCAR_RECORD_NOTICE, buffer, bytes,
                &fake->chunk_fd[info->form % OSCAR_FORMS][info->index % CHUNKS], gone ? 0 : 1);
}

static struct oscar_chunk_info chunk_info(const struct fake_oscard *fake, enum oscar_form form, uint32_t index) {
    return (struct oscar_chunk_info){.model = FAKE_MODEL,
                                     .form = form,
                                     .index = index,
                                     .generation = 1 + index,
                                     .bytes = FAKE_CHUNK_PAGES * page_bytes(fake, form),
                                     .writable = form == OSCAR_FORM_DENSE};
}

/* --- the verbs ---------------------------------------------------------------------------------------------------- */

static struct oscar_page_update *updates(const struct fake_oscard *fake) {
    return (struct oscar_page_update *)(void *)((char *)fake->window + OSCAR_WINDOW_UPDATES_OFFSET);
}

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
            fake->chunk_fd[form][i] = memfd("fake-chunk", FAKE_CHUNK_PAGES * page_bytes(fake, form), &memory);
            fake->chunk[form][i] = memory;
        }
}

static void answer_model_open(struct fake_oscard *fake, const struct oscar_request *request,
                              struct oscar_reply *reply) {
    make_chunks(fake, &request->model_open.identity.geometry);
    struct oscar_chunk_info info = chunk_info(fake, OSCAR_FORM_SINK, 0);
    send_chunks(fake, &info, false);
    info = chunk_info(fake, OSCAR_FORM_PACKED, 0);
    send_chunks(fake, &info, false);
    fake->announced_dense = false;

    struct oscar_calibration *calibration;
    require(oscar_calibration_default(&fake->geometry, &calibration, NULL) == 0);
    reply->model_open.model = FAKE_MODEL;
    memset(&reply->model_open.model_digest, 0x11, sizeof(reply->model_open.model_digest));
    reply->model_open.calibration_digest = calibration->digest;
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        reply->model_open.arenas[form] = (struct oscar_arena_info){
            .page_bytes = page_bytes(fake, form), .chunk_pages = FAKE_CHUNK_PAGES, .max_pages = FAKE_MAX_PAGES};
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
static uint32_t hit_updates(const struct fake_oscard *fake, uint32_t from, uint32_t to, struct oscar_page_update *ret) {
    (void)fake;
    for (uint32_t page = from; page < to; page++)
        ret[page - from] = (struct oscar_page_update){
            .page = page, .ref = oscar_page_ref_make(page == 0 ? OSCAR_FORM_SINK : OSCAR_FORM_PACKED, page)};
    return to - from;
}

static uint32_t whole(uint32_t tokens) { return tokens / OSCAR_PAGE_TOKENS; }

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void answer_seq_open(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    struct seq *seq = new_seq(fake, &reply->seq_open.seq, &reply->seq_open.fence_slot);
    uint32_t most = whole(request->seq_open.tokens) * OSCAR_PAGE_TOKENS;
    seq->committed = least(fake->hit, most);
    seq->room_pages = whole(seq->committed);
    reply->seq_open.hit_tokens = seq->committed;
    reply->seq_open.in_flight_tokens = least(fake->in_flight > fake->hit ? fake->in_flight : fake->hit, most);
    reply->seq_open.updates = hit_updates(fake, 0, seq->room_pages, updates(fake));
}

static void answer_seq_extend(struct fake_oscard *fake, struct seq *seq, const struct oscar_request *request,
                              struct oscar_reply *reply) {
    uint32_t before = whole(seq->committed), most = whole(request->seq_extend.tokens) * OSCAR_PAGE_TOKENS;
    seq->committed = least(fake->hit, most);
    seq->room_pages = whole(seq->committed);
    reply->seq_extend.hit_tokens = seq->committed;
    reply->seq_extend.in_flight_tokens = least(fake->in_flight > fake->hit ? fake->in_flight : fake->hit, most);
    reply->seq_extend.updates = hit_updates(fake, before, seq->room_pages, updates(fake));
}

static void announce_dense(struct fake_oscard *fake) {
    for (uint32_t i = 0; i < CHUNKS && !fake->announced_dense; i++) {
        struct oscar_chunk_info info = chunk_info(fake, OSCAR_FORM_DENSE, i);
        send_chunks(fake, &info, false);
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
        updates(fake)[reply->seq_reserve.updates++] = (struct oscar_page_update){
            .page = seq->room_pages, .ref = oscar_page_ref_make(OSCAR_FORM_DENSE, next_dense(fake))};
    reply->seq_reserve.reserved_tokens = seq->room_pages * OSCAR_PAGE_TOKENS;
}

static void answer_seq_advance(struct fake_oscard *fake, struct seq *seq, const struct oscar_request *request,
                               struct oscar_reply *reply) {
    seq->committed += request->seq_advance.tokens;
    reply->seq_advance.committed_tokens = seq->committed;
    reply->seq_advance.sealed_tokens = whole(seq->committed) * OSCAR_PAGE_TOKENS;
    reply->seq_advance.updates = fake->queued;
    memcpy(updates(fake), fake->queue, fake->queued * sizeof(fake->queue[0]));
    fake->queued = 0;
}

/* The child reads the parent's whole pages where they are, by forms that were never exchanged, and gets a tail of its own. */
static void answer_seq_fork(struct fake_oscard *fake, const struct seq *parent, struct oscar_reply *reply) {
    struct seq *child = new_seq(fake, &reply->seq_fork.seq, &reply->seq_fork.fence_slot);
    child->committed = parent->committed;
    uint32_t full = whole(parent->committed);
    reply->seq_fork.committed_tokens = parent->committed;
    reply->seq_fork.updates = hit_updates(fake, 0, full, updates(fake));
    child->room_pages = full;
    if (parent->committed % OSCAR_PAGE_TOKENS == 0)
        return;
    oscar_page_ref to = oscar_page_ref_make(OSCAR_FORM_DENSE, next_dense(fake));
    updates(fake)[reply->seq_fork.updates++] = (struct oscar_page_update){.page = full, .ref = to};
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
static void answer(struct fake_oscard *fake, const struct oscar_request *request) {
    struct plan *plan = &fake->plans[request->verb];
    struct oscar_reply reply = {.id = request->id, .verb = request->verb, .error = plan->error};
    struct seq *seq = &fake->seqs[(uint32_t)seq_of(request) % MAX_SEQS];
    int fd[2] = {fake->window_fd, fake->fences_fd};
    if (plan->error < 0) {
        strcpy(reply.cause, plan->cause);
        send_reply(fake, &reply, NULL, 0);
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
        reply.probe.hit_tokens = least(fake->hit, whole(request->probe.tokens) * OSCAR_PAGE_TOKENS);
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
        send_reply(fake, &reply, fd, request->verb == OSCAR_HELLO && reply.error == 0 ? 2 : 0);
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
static void take_request(struct fake_oscard *fake, const struct oscar_request *request) {
    struct plan *plan = &fake->plans[request->verb];
    plan->seen++;
    plan->last = *request;
    memcpy(plan->tokens, (const char *)fake->window + OSCAR_WINDOW_TOKENS_OFFSET,
           least(tokens_of(request), KEPT_TOKENS) * sizeof(uint32_t));
    plan->fence = atomic_load(&fake->fences[fake->seqs[(uint32_t)seq_of(request) % MAX_SEQS].slot]);
    pthread_cond_broadcast(&fake->changed);
    if (plan->die) {
        (void)close(fake->connection);
        fake->connection = -1;
    } else if (plan->hold) {
        require(fake->held < MAX_HELD);
        fake->held_requests[fake->held++] = *request;
    } else {
        answer(fake, request);
    }
}

/* --- its thread --------------------------------------------------------------------------------------------------- */

static void take_record(struct fake_oscard *fake) {
    static uint8_t buffer[OSCAR_MAX_RECORD_BYTES];
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
    struct iovec iov = {buffer, sizeof(buffer)};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    ssize_t length = recvmsg(fake->connection, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (length < 0 && errno == EAGAIN)
        return;
    struct oscar_record record;
    struct oscar_request request;
    pthread_mutex_lock(&fake->lock);
    if (length <= 0) {
        (void)close(fake->connection);
        fake->connection = -1;
        fake->held = 0;
        pthread_cond_broadcast(&fake->changed);
    } else {
        struct oscar_cause cause = {0};
        int r = oscar_record_parse(&message, (size_t)length, &record, &cause);
        if (r == 0)
            r = oscar_request_decode(record.payload, record.payload_bytes, &request, &cause);
        if (r < 0)
            fprintf(stderr, "fake_oscard: %s\n", cause.text);
        require(r == 0 && record.fds == 0);
        take_request(fake, &request);
    }
    pthread_mutex_unlock(&fake->lock);
}

static void *serve(void *argument) {
    struct fake_oscard *fake = argument;
    for (;;) {
        struct pollfd entries[2] = {
            {.fd = fake->stop, .events = POLLIN},
            {.fd = fake->connection >= 0 ? fake->connection : fake->listener, .events = POLLIN}};
        require(poll(entries, 2, -1) > 0 || errno == EINTR);
        if (entries[0].revents != 0)
            return NULL;
        if (entries[1].revents == 0)
            continue;
        if (fake->connection >= 0) {
            take_record(fake);
            continue;
        }
        int connection = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);
        pthread_mutex_lock(&fake->lock);
        fake->connection = connection;
        pthread_mutex_unlock(&fake->lock);
    }
}

struct fake_oscard *fake_oscard_start(void) {
    struct fake_oscard *fake = calloc(1, sizeof(*fake));
    require(fake != NULL);
    strcpy(fake->directory, "/tmp/fake-oscard-XXXXXX");
    require(mkdtemp(fake->directory) != NULL);
    (void)snprintf(fake->socket_path, sizeof(fake->socket_path), "%s/worker.sock", fake->directory);
    fake->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, fake->socket_path);
    require(bind(fake->listener, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(fake->listener, 8) == 0);
    fake->connection = -1;
    fake->stop = eventfd(0, EFD_CLOEXEC);
    pthread_mutex_init(&fake->lock, NULL);
    pthread_cond_init(&fake->changed, NULL);
    void *memory;
    fake->window_fd = memfd("fake-window", OSCAR_WINDOW_BYTES, &memory);
    fake->window = memory;
    fake->window->magic = OSCAR_WINDOW_MAGIC;
    fake->window->version = OSCAR_WINDOW_VERSION;
    fake->fences_fd = memfd("fake-fences", OSCAR_FENCE_BYTES, &memory);
    fake->fences = memory;
    require(pthread_create(&fake->thread, NULL, serve, fake) == 0);
    return fake;
}

void fake_oscard_stop(struct fake_oscard *fake) {
    require(eventfd_write(fake->stop, 1) == 0);
    pthread_join(fake->thread, NULL);
    (void)close(fake->stop);
    (void)close(fake->listener);
    if (fake->connection >= 0)
        (void)close(fake->connection);
    (void)unlink(fake->socket_path);
    (void)rmdir(fake->directory);
    for (unsigned form = 0; form < OSCAR_FORMS && fake->geometry.layers != 0; form++)
        for (unsigned i = 0; i < CHUNKS; i++) {
            (void)munmap(fake->chunk[form][i], FAKE_CHUNK_PAGES * page_bytes(fake, form));
            (void)close(fake->chunk_fd[form][i]);
        }
    (void)munmap(fake->window, OSCAR_WINDOW_BYTES);
    (void)munmap((void *)fake->fences, OSCAR_FENCE_BYTES);
    (void)close(fake->window_fd);
    (void)close(fake->fences_fd);
    pthread_cond_destroy(&fake->changed);
    pthread_mutex_destroy(&fake->lock);
    free(fake);
}

const char *fake_oscard_socket(const struct fake_oscard *fake) { return fake->socket_path; }

/* --- what the test says ------------------------------------------------------------------------------------------- */

#define WITH_LOCK(fake, statement)                                                                                     \
    do {                                                                                                               \
        pthread_mutex_lock(&(fake)->lock);                                                                             \
        statement;                                                                                                     \
        pthread_mutex_unlock(&(fake)->lock);                                                                           \
    } while (0)

void fake_oscard_change(struct fake_oscard *fake, enum oscar_verb verb, fake_change *change) {
    WITH_LOCK(fake, fake->plans[verb].change = change);
}

void fake_oscard_fail(struct fake_oscard *fake, enum oscar_verb verb, int error, const char *cause) {
    pthread_mutex_lock(&fake->lock);
    fake->plans[verb].error = error;
    (void)snprintf(fake->plans[verb].cause, sizeof(fake->plans[verb].cause), "%s", cause);
    pthread_mutex_unlock(&fake->lock);
}

void fake_oscard_hold(struct fake_oscard *fake, enum oscar_verb verb) {
    WITH_LOCK(fake, fake->plans[verb].hold = true);
}

void fake_oscard_let_go(struct fake_oscard *fake, enum oscar_verb verb) {
    pthread_mutex_lock(&fake->lock);
    fake->plans[verb].hold = false;
    unsigned kept = 0;
    for (unsigned i = 0; i < fake->held; i++) {
        if (fake->held_requests[i].verb == verb)
            answer(fake, &fake->held_requests[i]);
        else
            fake->held_requests[kept++] = fake->held_requests[i];
    }
    fake->held = kept;
    pthread_mutex_unlock(&fake->lock);
}

void fake_oscard_die_at(struct fake_oscard *fake, enum oscar_verb verb) {
    WITH_LOCK(fake, fake->plans[verb].die = true);
}

void fake_oscard_set_hit(struct fake_oscard *fake, uint32_t hit_tokens, uint32_t in_flight_tokens) {
    WITH_LOCK(fake, (fake->hit = hit_tokens, fake->in_flight = in_flight_tokens));
}

void fake_oscard_queue_update(struct fake_oscard *fake, uint32_t page, oscar_page_ref ref) {
    WITH_LOCK(fake, (fake->queue[fake->queued++] = (struct oscar_page_update){.page = page, .ref = ref}));
}

void fake_oscard_raise_updates(struct fake_oscard *fake) { atomic_fetch_add(&fake->window->updates_waiting, 1); }

oscar_fence_slot *fake_oscard_fence(struct fake_oscard *fake, uint32_t slot) { return &fake->fences[slot]; }

uint8_t *fake_oscard_page(struct fake_oscard *fake, oscar_page_ref ref) {
    unsigned form = oscar_page_ref_form(ref);
    uint64_t id = oscar_page_ref_id(ref);
    return fake->chunk[form][id / FAKE_CHUNK_PAGES] + id % FAKE_CHUNK_PAGES * page_bytes(fake, form);
}

struct oscar_page_update *fake_oscard_updates(struct fake_oscard *fake) {
    return updates(fake);
}

struct oscar_window_header *fake_oscard_window(struct fake_oscard *fake) {
    return fake->window;
}

struct oscar_chunk_info fake_oscard_chunk(struct fake_oscard *fake, enum oscar_form form, uint32_t index) {
    return chunk_info(fake, form, index);
}

void fake_oscard_announce(struct fake_oscard *fake, const struct oscar_chunk_info *info) {
    WITH_LOCK(fake, send_chunks(fake, info, false));
}

void fake_oscard_gone(struct fake_oscard *fake, const struct oscar_chunk_info *info) {
    WITH_LOCK(fake, send_chunks(fake, info, true));
}

void fake_oscard_send(struct fake_oscard *fake, const struct oscar_reply *reply) {
    WITH_LOCK(fake, send_reply(fake, reply, NULL, 0));
}

void fake_oscard_send_bytes(struct fake_oscard *fake, enum oscar_record_kind kind, const void *bytes, uint32_t size,
                            unsigned fds) {
    int fd[OSCAR_MAX_RECORD_FDS];
    for (unsigned i = 0; i < fds; i++)
        fd[i] = fake->window_fd;
    WITH_LOCK(fake, send_record(fake, kind, bytes, size, fd, fds));
}

/* --- what it has seen --------------------------------------------------------------------------------------------- */

unsigned fake_oscard_count(struct fake_oscard *fake, enum oscar_verb verb) {
    unsigned seen;
    WITH_LOCK(fake, seen = fake->plans[verb].seen);
    return seen;
}

struct oscar_request fake_oscard_last(struct fake_oscard *fake, enum oscar_verb verb) {
    struct oscar_request last;
    WITH_LOCK(fake, last = fake->plans[verb].last);
    return last;
}

const uint32_t *fake_oscard_tokens(struct fake_oscard *fake, enum oscar_verb verb) { return fake->plans[verb].tokens; }

uint64_t fake_oscard_fence_then(struct fake_oscard *fake, enum oscar_verb verb) {
    uint64_t fence;
    WITH_LOCK(fake, fence = fake->plans[verb].fence);
    return fence;
}

void fake_oscard_settle(struct fake_oscard *fake) {
    pthread_mutex_lock(&fake->lock);
    while (fake->connection >= 0)
        pthread_cond_wait(&fake->changed, &fake->lock);
    pthread_mutex_unlock(&fake->lock);
}

bool fake_oscard_wait(struct fake_oscard *fake, enum oscar_verb verb, unsigned count) {
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 2;
    int r = 0;
    pthread_mutex_lock(&fake->lock);
    while (fake->plans[verb].seen < count && r == 0)
        r = pthread_cond_timedwait(&fake->changed, &fake->lock, &until);
    bool enough = fake->plans[verb].seen >= count;
    pthread_mutex_unlock(&fake->lock);
    return enough;
}
