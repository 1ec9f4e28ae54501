/* SPDX-License-Identifier: Apache-2.0 */
/* MODEL_OPEN: its calibration is found and read off the loop while the request is parked; then the store opens the
 * model, which for a new one takes until the device has the calibration, too. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/serve/state.h"
#include "proto/cleanup.h"
#include "proto/geometry.h"

/* Each costs the daemon a descriptor and two mappings until the process exits. */
#define MAX_QUARANTINED_A_PROCESS 256U

struct parked_open {
    struct parked_open *next;
    uint64_t ticket; /* of the calibration; 0: it is there, the store waits for the device */
    uint64_t request_id;
    struct session *session; /* NULL: its connection has ended */
    struct oscar_identity identity;
};

int models_open(struct session *session, const struct oscar_request *request, struct oscar_cause *cause) {
    struct serve *serve = session->serve;
    if (!session->has_opened_model && session_quarantined(session) >= MAX_QUARANTINED_A_PROCESS)
        return oscar_fail(cause, OSCAR_ERR_LIMIT,
                          "process %d has ended %u connections with open models, whose memory it may still use: keep "
                          "connections open, or let the process exit",
                          (int)session->peer.pid, MAX_QUARANTINED_A_PROCESS);
    /* Before anything is allocated by it. */
    int r = oscar_geometry_check(&request->model_open.identity.geometry, cause);
    if (r < 0)
        return r;
    _cleanup_free_ struct parked_open *parked = calloc(1, sizeof(*parked));
    if (parked == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the request");
    static uint64_t last_ticket;
    parked->ticket = ++last_ticket;
    parked->request_id = request->id;
    parked->session = session;
    parked->identity = request->model_open.identity;
    memcpy(parked->identity.tenant, session->tenant, sizeof(parked->identity.tenant));
    r = calibrations_load(serve->calibrations, request->model_open.calibration, &parked->identity.geometry,
                          parked->ticket, cause);
    if (r < 0)
        return r;
    parked->next = serve->parked_opens;
    serve->parked_opens = TAKE_PTR(parked);
    return OSCAR_PARKED;
}

static struct parked_open *take_parked(struct serve *serve, uint64_t ticket) {
    struct parked_open **at = &serve->parked_opens;
    while (*at != NULL && (*at)->ticket != ticket)
        at = &(*at)->next;
    struct parked_open *parked = *at;
    if (parked != NULL)
        *at = parked->next;
    return parked;
}

/* Takes `parked` and what is in `result`, which is empty where the store has the calibration already. */
static void open_model(struct session *session, struct parked_open *parked_taken, struct calibrations_result *result) {
    struct serve *serve = session->serve;
    _cleanup_free_ struct parked_open *parked = parked_taken;
    struct oscar_reply reply = {.id = parked->request_id, .verb = OSCAR_MODEL_OPEN};
    struct oscar_cause cause = {0};
    int fd[2];
    unsigned fds = 0;
    int r = store_model_open(serve->store, session->client, &parked->identity, result->calibration, result->file_fd,
                             result->turns_fd, &reply, fd, &fds, &cause);
    announce_flush(session);
    if (r == OSCAR_PARKED) {
        parked->ticket = 0;
        parked->next = serve->parked_opens;
        serve->parked_opens = TAKE_PTR(parked);
        return;
    }
    session->parked--;
    if (r < 0) {
        session_reply_error(session, parked->request_id, OSCAR_MODEL_OPEN, r, cause.text);
        return;
    }
    session->has_opened_model = true;
    reply.id = parked->request_id;
    reply.verb = OSCAR_MODEL_OPEN;
    session_reply(session, &reply, fd, fds);
    store_model_announce(serve->store, session->client, reply.model_open.model);
    announce_flush(session);
}

void models_loaded(void *arg) {
    struct serve *serve = arg;
    struct calibrations_result result;
    while (calibrations_take(serve->calibrations, &result)) {
        _cleanup_free_ struct parked_open *parked = take_parked(serve, result.ticket);
        if (result.read)
            serve->counters.calibrations_loaded++;
        struct session *session = parked != NULL ? parked->session : NULL;
        if (session == NULL) {
            calibrations_result_free(&result);
            continue;
        }
        if (result.error < 0) {
            session->parked--;
            session_reply_error(session, parked->request_id, OSCAR_MODEL_OPEN, result.error, result.cause.text);
            continue;
        }
        parked->identity.calibration = result.calibration->digest;
        open_model(session, TAKE_PTR(parked), &result);
    }
}

void models_changed(void *arg) {
    struct serve *serve = arg;
    serve->models_changed = true;
}

void models_retry(struct serve *serve) {
    if (!serve->models_changed)
        return;
    serve->models_changed = false;
    struct parked_open *all = serve->parked_opens;
    serve->parked_opens = NULL;
    for (struct parked_open *parked = all, *next; parked != NULL; parked = next) {
        next = parked->next;
        if (parked->ticket != 0) {
            parked->next = serve->parked_opens;
            serve->parked_opens = parked;
        } else if (parked->session == NULL) {
            free(parked);
        } else {
            struct calibrations_result none = {.file_fd = -1, .turns_fd = -1};
            open_model(parked->session, parked, &none);
        }
    }
}

void models_forget(struct session *session) {
    for (struct parked_open *parked = session->serve->parked_opens; parked != NULL; parked = parked->next)
        if (parked->session == session)
            parked->session = NULL;
}

void models_free(struct serve *serve) {
    for (struct parked_open *parked = serve->parked_opens, *next; parked != NULL; parked = next) {
        next = parked->next;
        free(parked);
    }
    serve->parked_opens = NULL;
}
