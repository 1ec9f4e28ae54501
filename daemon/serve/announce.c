/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunk notices. The store announces chunks one by one while it works on a call; a client must have them before the
 * reply that refers to them. So they are collected a session and sent just before its next reply, or before the loop
 * waits. Those that are there when a model is opened follow its reply, which alone tells the client where to map them:
 * it closes the descriptors of a record before it takes the next one.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/serve/state.h"

#define NOTICE_CHUNKS 64U /* a record could bring 200 descriptors: too many for a process with few to spare */

struct announcements {
    struct oscar_notice notice; /* of one kind */
    int fd[NOTICE_CHUNKS];
};

static void clear(struct announcements *announcements) {
    if (announcements->notice.kind == OSCAR_NOTICE_CHUNKS)
        for (uint32_t i = 0; i < announcements->notice.chunks; i++)
            close(announcements->fd[i]);
    announcements->notice.chunks = 0;
}

static void send_collected(struct session *session) {
    struct serve *serve = session->serve;
    struct announcements *announcements = session->announcements;
    if (announcements == NULL || announcements->notice.chunks == 0)
        return;
    size_t bytes;
    int r = oscar_notice_encode(&announcements->notice, serve->payload, sizeof(serve->payload), &bytes);
    unsigned fds = announcements->notice.kind == OSCAR_NOTICE_CHUNKS ? announcements->notice.chunks : 0;
    if (r == 0 && session->link != NULL)
        r = loop_link_send(session->link, OSCAR_RECORD_NOTICE, serve->payload, (uint32_t)bytes, announcements->fd, fds);
    if (r == OSCAR_ERR_LIMIT)
        serve->counters.queue_overflows++;
    else if (r < 0 && r != OSCAR_ERR_DISCONNECTED && session->broken_why == NULL)
        session->broken_why = "its chunks could not be announced";
    serve->counters.chunks_announced += fds;
    clear(announcements);
}

/* Room for one more entry of this kind; what is of the other kind leaves first, so that the order stays. */
static struct oscar_chunk_info *next_entry(struct session *session, enum oscar_notice_kind kind) {
    if (session->announcements == NULL) {
        session->announcements = calloc(1, sizeof(*session->announcements));
        if (session->announcements == NULL) {
            session->broken_why = "out of memory";
            return NULL;
        }
    }
    struct oscar_notice *notice = &session->announcements->notice;
    if (notice->chunks == NOTICE_CHUNKS || (notice->chunks > 0 && notice->kind != kind))
        send_collected(session);
    notice->kind = kind;
    return &notice->chunk[notice->chunks];
}

static void mark_dirty(struct session *session) {
    struct serve *serve = session->serve;
    if (session->dirty)
        return;
    session->dirty = true;
    session->next_dirty = serve->dirty;
    serve->dirty = session;
}

void announce_chunk(void *arg, void *client_arg, const struct oscar_chunk_info *info, int fd) {
    (void)arg;
    struct session *session = client_arg;
    if (session->link == NULL)
        return;
    mark_dirty(session);
    struct oscar_chunk_info *entry = next_entry(session, OSCAR_NOTICE_CHUNKS);
    if (entry == NULL)
        return;
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy < 0) {
        /* Without this chunk the client would read what it has not mapped. */
        session->broken_why = "out of descriptors";
        return;
    }
    *entry = *info;
    session->announcements->fd[session->announcements->notice.chunks++] = copy;
}

void announce_chunk_gone(void *arg, void *client_arg, const struct oscar_chunk_info *info) {
    (void)arg;
    struct session *session = client_arg;
    if (session->link == NULL)
        return;
    mark_dirty(session);
    struct oscar_chunk_info *entry = next_entry(session, OSCAR_NOTICE_CHUNKS_GONE);
    if (entry == NULL)
        return;
    *entry = *info;
    session->announcements->notice.chunks++;
}

void announce_flush(struct session *session) { send_collected(session); }

void announce_flush_dirty(struct serve *serve) {
    while (serve->dirty != NULL) {
        struct session *session = serve->dirty;
        serve->dirty = session->next_dirty;
        session->dirty = false;
        send_collected(session);
        free(session->announcements);
        session->announcements = NULL;
        if (session->broken_why != NULL && session->link != NULL)
            session_end(session, session->broken_why, false);
    }
}

void announce_forget(struct session *session) {
    if (session->announcements != NULL)
        clear(session->announcements);
    free(session->announcements);
    session->announcements = NULL;
    if (!session->dirty)
        return;
    struct session **at = &session->serve->dirty;
    while (*at != session)
        at = &(*at)->next_dirty;
    *at = session->next_dirty;
    session->dirty = false;
}
