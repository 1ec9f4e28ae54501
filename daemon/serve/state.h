/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of this room share: the server, its sessions, and who does what with them. */
#ifndef OSCAR_DAEMON_SERVE_STATE_H
#define OSCAR_DAEMON_SERVE_STATE_H

#include <sys/queue.h>

#include "daemon/log.h"
#include "daemon/serve/admin.h"
#include "daemon/serve/calibrations.h"
#include "daemon/serve/endpoint.h"
#include "daemon/serve/metrics.h"
#include "daemon/serve/peer.h"
#include "daemon/serve/serve.h"
#include "daemon/serve/window.h"
#include "daemon/store/store.h"
#include "proto/wire.h"

/* Answers that may be outstanding on one connection: all of them may come at once and have to fit its queue, chunks
 * included. */
#define SERVE_MAX_PARKED (LOOP_LINK_QUEUE_RECORDS / 2)

enum session_state {
    SESSION_NEW,   /* connected: only HELLO */
    SESSION_READY, /* HELLO was answered: everything else. It has one of the places of [limits] clients. */
    SESSION_STATES,
};

struct announcements; /* chunks that a client has yet to be told of */
struct parked_open;   /* a MODEL_OPEN whose calibration is being read */

/* One connection; and after its end, until its process has exited, what that process may still use. */
struct session {
    struct serve *serve;
    struct session *next, **link_to; /* serve->sessions */
    struct session *next_dirty;      /* serve->dirty: has announcements */
    TAILQ_ENTRY(session) in_silent;  /* serve->silent: SESSION_NEW, with a link */
    bool dirty;
    bool has_opened_model; /* its process may have mapped chunks */
    uint64_t id;
    enum session_state state;
    struct loop_link *link; /* NULL: the connection has ended */
    const char *broken_why; /* set inside a store call: the connection ends after it */
    struct peer peer;
    struct loop_source *exit_watch;
    char tenant[OSCAR_NAME_BYTES], client_name[OSCAR_NAME_BYTES];
    struct window window;
    struct store_client *client; /* NULL before HELLO */
    unsigned parked;
    struct announcements *announcements;
};

struct serve {
    struct loop *loop;
    const struct config *config;
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    uint64_t device_bytes;
    struct store *store;
    uint64_t incarnation;

    struct endpoint *worker_endpoint;
    int listener;
    struct loop_source *listener_watch, *listener_retry;
    int directory_events; /* inotify: the socket's directory */
    struct loop_source *directory_watch;

    struct session *sessions, *dirty;
    uint64_t last_session;
    unsigned clients;                        /* sessions in SESSION_READY with a link */
    unsigned silent_count;                   /* and those in SESSION_NEW: */
    TAILQ_HEAD(silent_head, session) silent; /* the oldest first */

    struct loop_source *store_watch, *fence_timer, *deadline_timer, *device_timer;
    uint64_t fence_interval_ns;
    bool fence_timer_armed;
    uint64_t
        watched_work; /* number of the device's oldest piece of work when the device timer was armed, 0: it is not */
    unsigned watched_ticks; /* how often it was the same */
    bool device_failed;

    struct calibrations *calibrations;
    struct loop_source *calibrations_watch;
    struct parked_open *parked_opens;
    bool models_changed;

    struct admin *admin;
    struct serve_counters counters;
    struct log_limit arrivals, departures, violations, refusals, accept_failures;
    bool draining;
    uint8_t payload[OSCAR_MAX_RECORD_PAYLOAD_BYTES];
};

/* --- listener.c --- */
int listener_open(struct serve *serve, struct oscar_cause *cause);
void listener_close(struct serve *serve);

/* --- session.c --- */
/* Takes the socket. A negative errno when there is no descriptor left to watch its process by. */
int session_accept(struct serve *serve, int socket);
/* HELLO: the session takes a place. OSCAR_ERR_LIMIT when all of them are taken. */
int session_take_place(struct session *session, struct oscar_cause *cause);
/* The connection ends: queued replies leave first if `flush`. The session is freed, now or when its process exits. */
void session_end(struct session *session, const char *why, bool flush);
/* The client broke the protocol: one line in the log, a reply if the request is known (else NULL), the end. */
void session_violation(struct session *session, const struct oscar_request *request, int error,
                       const struct oscar_cause *cause);
void session_reply(struct session *session, const struct oscar_reply *reply, const int *fd, unsigned fds);
void session_reply_error(struct session *session, uint64_t request_id, enum oscar_verb verb, int error,
                         const char *text);
/* The store's hook: it has let go of an ended session's client. */
void session_over(void *arg, void *client_arg);
/* At the end of the server: as if every process had exited. The last ones go with the store. */
void session_end_all(struct serve *serve);
/* Ended connections of the same process that it may still read or write pages through. */
unsigned session_quarantined(const struct session *session);

/* --- verbs.c --- */
void verbs_handle(struct session *session, const struct oscar_request *request);

/* --- models.c: MODEL_OPEN --- */
int models_open(struct session *session, const struct oscar_request *request, struct oscar_cause *cause);
void models_loaded(void *arg);          /* the loop's callback: calibrations have been read */
void models_changed(void *arg);         /* the store's hook: it has models that it had not */
void models_retry(struct serve *serve); /* after a poll of the store: opens that waited for those */
void models_forget(struct session *session);
void models_free(struct serve *serve);

/* --- announce.c --- */
void announce_chunk(void *arg, void *client_arg, const struct oscar_chunk_info *info, int fd);
void announce_chunk_gone(void *arg, void *client_arg, const struct oscar_chunk_info *info);
void announce_flush(struct session *session);
void announce_flush_dirty(struct serve *serve);
void announce_forget(struct session *session);

/* --- pump.c: what the store waits for --- */
int pump_open(struct serve *serve, struct oscar_cause *cause);
void pump_close(struct serve *serve);
void pump_arm(struct serve *serve);    /* before the loop waits */
void pump_hasten(struct serve *serve); /* a client has just done something: look at fences soon */

/* --- serve.c --- */
/* The store's hook, and the pump's finding: nothing can be relied on that the device does. The loop ends. */
void serve_device_failed(void *arg, const struct oscar_cause *cause);

#endif
