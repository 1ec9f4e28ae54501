/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/serve/serve.h"

#include <stdlib.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "daemon/serve/state.h"
#include "proto/cleanup.h"

static void waiter_done(void *arg, void *client_arg, uint64_t request_id, const struct oscar_reply *done) {
    (void)arg;
    struct session *session = client_arg;
    session->parked--;
    announce_flush(session);
    struct oscar_reply reply = *done;
    reply.id = request_id;
    session_reply(session, &reply, NULL, 0);
}

void serve_device_failed(void *arg, const struct oscar_cause *cause) {
    struct serve *serve = arg;
    log_error("the device has failed: the daemon ends, and with it the cache",
              log_text("device", serve->ops->device_id(serve->device)), log_text("cause", cause->text));
    serve->device_failed = true;
    loop_stop(serve->loop);
}

bool serve_has_failed(const struct serve *serve) { return serve->device_failed; }

void serve_abandon(struct serve *serve) {
    listener_close(serve);
    admin_close(serve->admin);
    serve->admin = NULL;
}

static void store_event_seen(void *arg, const struct oscar_event *event) {
    struct serve *serve = arg;
    admin_publish(serve->admin, event);
}

static void measure_turn(struct serve *serve) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t now_ns = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
    uint64_t busy_ns = now_ns - loop_now_ns(serve->loop);
    if (serve->counters.turns++ > 0 && busy_ns > serve->counters.turn_ns_max)
        serve->counters.turn_ns_max = busy_ns; /* the first turn holds the start-up */
}

static void before_wait(void *arg) {
    struct serve *serve = arg;
    announce_flush_dirty(serve);
    pump_arm(serve);
    measure_turn(serve);
    if (serve->draining && !loop_links_flushing(serve->loop))
        loop_stop(serve->loop);
}

static int random_number(uint64_t *ret, struct oscar_cause *cause) {
    if (getrandom(ret, sizeof(*ret), 0) != sizeof(*ret))
        return oscar_fail(cause, OSCAR_ERR_INTERNAL, "getrandom: %m");
    return 0;
}

#define OWN_DESCRIPTORS 256U  /* files, sockets, the device driver's, copies on their way to clients */
#define CLIENT_DESCRIPTORS 2U /* its socket, its process */
#define CHUNK_DESCRIPTORS 3U  /* the backend's, for readers, for its writer */

uint64_t serve_descriptors(const struct serve_options *options) {
    /* Where pages do not fill a chunk without padding, it may be half of what it aims at. */
    uint64_t chunks = 2 * options->budget_bytes / config_chunk_bytes(options->config, options->budget_bytes, false);
    return OWN_DESCRIPTORS + options->config->clients * CLIENT_DESCRIPTORS + chunks * CHUNK_DESCRIPTORS;
}

static int make_store(struct serve *serve, const struct serve_options *options, struct oscar_cause *cause) {
    const struct config *config = serve->config;
    uint64_t hash_seed;
    int r = random_number(&hash_seed, cause);
    if (r < 0)
        return r;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t pack_threads = config->pack_threads > 0 ? (uint32_t)config->pack_threads
                            : cores >= 8             ? (uint32_t)cores / 4
                                                     : 1;
    struct store_options store_options = {
        .ops = options->ops,
        .device = options->device,
        .budget_bytes = options->budget_bytes,
        .packed_chunk_bytes = config_chunk_bytes(config, options->budget_bytes, true),
        .dense_chunk_bytes = config_chunk_bytes(config, options->budget_bytes, false),
        .pack_threads = pack_threads,
        .max_sequences = (uint32_t)config->sequences,
        .max_leases = (uint32_t)config->leases,
        .hash_seed = hash_seed,
        .hooks = {.arg = serve,
                  .chunk_announce = announce_chunk,
                  .chunk_gone = announce_chunk_gone,
                  .waiter_done = waiter_done,
                  .client_over = session_over,
                  .event = store_event_seen,
                  .models_changed = models_changed,
                  .device_failed = serve_device_failed},
    };
    return store_new(&store_options, &serve->store, cause);
}

static int open_calibrations(struct serve *serve, struct oscar_cause *cause) {
    uint64_t pages = (serve->config->max_context_tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    int r = calibrations_new(serve->config->calibration_dir, (uint32_t)pages, &serve->calibrations, cause);
    if (r < 0)
        return r;
    r = loop_watch(serve->loop, calibrations_event_fd(serve->calibrations), models_loaded, serve,
                   &serve->calibrations_watch);
    return r < 0 ? oscar_fail(cause, r, "calibrations cannot be watched: %s", oscar_error_text(r)) : 0;
}

static void serve_cleanup(struct serve **serve) { serve_free(*serve); }

int serve_new(const struct serve_options *options, struct serve **ret, struct oscar_cause *cause) {
    _cleanup_(serve_cleanup) struct serve *serve = calloc(1, sizeof(*serve));
    if (serve == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the server");
    serve->loop = options->loop;
    serve->config = options->config;
    serve->ops = options->ops;
    serve->device = options->device;
    serve->device_bytes = options->device_bytes;
    serve->listener = serve->directory_events = -1;
    TAILQ_INIT(&serve->silent);
    /* Good clients come in crowds; faults of the same kind are told a few times. */
    serve->arrivals.lines_max = serve->departures.lines_max = 500;
    serve->violations.lines_max = serve->refusals.lines_max = serve->accept_failures.lines_max = 10;
    int r = random_number(&serve->incarnation, cause);
    serve->incarnation = (serve->incarnation >> 1) | 1; /* 63 bits, never 0 */
    /* The paths first: a second daemon is refused before it has taken any memory. */
    if (r == 0)
        r = endpoint_directory(serve->config->runtime_dir, cause);
    if (r == 0)
        r = endpoint_claim(serve->config->socket, &serve->worker_endpoint, cause);
    if (r == 0)
        r = admin_open(serve, &serve->admin, cause);
    if (r == 0)
        r = make_store(serve, options, cause);
    if (r == 0)
        r = pump_open(serve, cause);
    if (r == 0)
        r = open_calibrations(serve, cause);
    if (r == 0)
        r = listener_open(serve, cause);
    if (r < 0)
        return r;
    loop_on_idle(serve->loop, before_wait, serve);
    *ret = TAKE_PTR(serve);
    return 0;
}

void serve_drain(struct serve *serve) {
    if (serve->draining)
        return;
    serve->draining = true;
    listener_close(serve);
    for (struct session *session = serve->sessions, *next; session != NULL; session = next) {
        next = session->next;
        if (session->link != NULL)
            session_end(session, "the daemon stops", true);
    }
}

void serve_free(struct serve *serve) {
    if (serve == NULL)
        return;
    loop_on_idle(serve->loop, NULL, NULL);
    listener_close(serve);
    session_end_all(serve);
    if (serve->store != NULL) {
        pump_close(serve);
        store_free(serve->store);
    }
    loop_remove(serve->loop, serve->calibrations_watch);
    calibrations_free(serve->calibrations); /* after the store, whose models point into them */
    models_free(serve);
    admin_close(serve->admin);
    free(serve);
}
