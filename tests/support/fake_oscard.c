/* SPDX-License-Identifier: Apache-2.0 */
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

#include "proto/geometry.h"
#include "tests/support/fake_oscard_state.h"

#define PATIENCE_S 20

int fake_memfd(const char *name, size_t bytes, void **ret) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    require(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    require(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    *ret = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    require(*ret != MAP_FAILED);
    return fd;
}

uint64_t fake_page_bytes(const struct fake_oscard *fake, unsigned form) {
    return form == OSCAR_FORM_PACKED ? oscar_packed_page_bytes(&fake->geometry)
                                     : oscar_dense_page_bytes(&fake->geometry);
}

uint32_t fake_least(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* --- sending ------------------------------------------------------------------------------------------------------ */

void fake_send_record(struct fake_oscard *fake, enum oscar_record_kind kind, const void *bytes, size_t size,
                      const int *fd, unsigned fds) {
    if (fake->connection >= 0)
        (void)oscar_record_send(fake->connection, kind, bytes, (uint32_t)size, fd, fds, 1000, NULL);
}

void fake_send_reply(struct fake_oscard *fake, const struct oscar_reply *reply, const int *fd, unsigned fds) {
    static uint8_t buffer[OSCAR_MAX_RECORD_PAYLOAD_BYTES]; /* with the lock */
    size_t bytes;
    require(oscar_reply_encode(reply, buffer, sizeof(buffer), &bytes) == 0);
    fake_send_record(fake, OSCAR_RECORD_REPLY, buffer, bytes, fd, fds);
}

void fake_send_chunks(struct fake_oscard *fake, const struct oscar_chunk_info *info, bool gone) {
    uint8_t buffer[1024];
    size_t bytes;
    struct oscar_notice notice = {
        .kind = gone ? OSCAR_NOTICE_CHUNKS_GONE : OSCAR_NOTICE_CHUNKS, .chunks = 1, .chunk = {*info}};
    require(oscar_notice_encode(&notice, buffer, sizeof(buffer), &bytes) == 0);
    fake_send_record(fake, OSCAR_RECORD_NOTICE, buffer, bytes,
                     &fake->chunk_fd[info->form % OSCAR_FORMS][info->index % CHUNKS], gone ? 0 : 1);
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
        fake_take_request(fake, &request);
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
    fake->window_fd = fake_memfd("fake-window", OSCAR_WINDOW_BYTES, &memory);
    fake->window = memory;
    fake->window->magic = OSCAR_WINDOW_MAGIC;
    fake->window->version = OSCAR_WINDOW_VERSION;
    fake->fences_fd = fake_memfd("fake-fences", OSCAR_FENCE_BYTES, &memory);
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
            (void)munmap(fake->chunk[form][i], FAKE_CHUNK_PAGES * fake_page_bytes(fake, form));
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
            fake_answer(fake, &fake->held_requests[i]);
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
    return fake->chunk[form][id / FAKE_CHUNK_PAGES] + id % FAKE_CHUNK_PAGES * fake_page_bytes(fake, form);
}

struct oscar_page_update *fake_oscard_updates(struct fake_oscard *fake) {
    return (struct oscar_page_update *)(void *)((char *)fake->window + OSCAR_WINDOW_UPDATES_OFFSET);
}

struct oscar_window_header *fake_oscard_window(struct fake_oscard *fake) {
    return fake->window;
}

struct oscar_chunk_info fake_oscard_chunk(struct fake_oscard *fake, enum oscar_form form, uint32_t index) {
    return (struct oscar_chunk_info){.model = FAKE_MODEL,
                                     .form = form,
                                     .index = index,
                                     .generation = 1 + index,
                                     .bytes = FAKE_CHUNK_PAGES * fake_page_bytes(fake, form),
                                     .writable = form == OSCAR_FORM_DENSE};
}

void fake_oscard_announce(struct fake_oscard *fake, const struct oscar_chunk_info *info) {
    WITH_LOCK(fake, fake_send_chunks(fake, info, false));
}

void fake_oscard_gone(struct fake_oscard *fake, const struct oscar_chunk_info *info) {
    WITH_LOCK(fake, fake_send_chunks(fake, info, true));
}

void fake_oscard_send(struct fake_oscard *fake, const struct oscar_reply *reply) {
    WITH_LOCK(fake, fake_send_reply(fake, reply, NULL, 0));
}

void fake_oscard_send_bytes(struct fake_oscard *fake, enum oscar_record_kind kind, const void *bytes, uint32_t size,
                            unsigned fds) {
    int fd[OSCAR_MAX_RECORD_FDS];
    for (unsigned i = 0; i < fds; i++)
        fd[i] = fake->window_fd;
    WITH_LOCK(fake, fake_send_record(fake, kind, bytes, size, fd, fds));
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
    until.tv_sec += PATIENCE_S;
    int r = 0;
    pthread_mutex_lock(&fake->lock);
    while (fake->plans[verb].seen < count && r == 0)
        r = pthread_cond_timedwait(&fake->changed, &fake->lock, &until);
    bool enough = fake->plans[verb].seen >= count;
    pthread_mutex_unlock(&fake->lock);
    return enough;
}
