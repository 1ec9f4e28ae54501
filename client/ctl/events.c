/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events as JSON lines, from the position on that the first line ("following") names. A publisher drops what a slow subscriber does not take, so every event is numbered: where one is missing,
 * or the daemon was started anew, a line "resync" says that all that was known is void; the pages that are there now follow
 * as lines "stored" with "snapshot": true, then the events behind them (proto/PROTOCOL.md, Events).
 */
#include <inttypes.h>
#include <stdio.h>

#include "client/ctl/admin.h"
#include "proto/cleanup.h"

/* Where in the stream of events the reader stands: the last one that it knows. */
struct position {
    uint64_t incarnation, sequence;
};

static const char *const kinds[] = {
    [OSCAR_EVENT_STORED] = "stored",
    [OSCAR_EVENT_COMPRESSED] = "compressed",
    [OSCAR_EVENT_REMOVED] = "removed",
    [OSCAR_EVENT_CLEARED] = "cleared",
};
static const char *const forms[OSCAR_FORMS] = {"sink", "dense", "packed"};

static json_t *position_json(const char *kind, const struct position *at) {
    char incarnation[17]; /* a text: 64 bits do not survive every reader of JSON numbers */
    (void)snprintf(incarnation, sizeof(incarnation), "%016" PRIx64, at->incarnation);
    return json_pack("{s:s, s:s, s:I}", "event", kind, "incarnation", incarnation, "sequence",
                     (json_int_t)at->sequence);
}

static int set_digest(json_t *object, const char *key, const struct oscar_digest *digest) {
    char hex[2 * OSCAR_DIGEST_BYTES + 1];
    oscar_digest_hex(digest, hex);
    return json_object_set_new(object, key, json_string(hex));
}

static json_t *event_json(const struct oscar_event *event, bool snapshot) {
    json_t *object = position_json(kinds[event->kind], &(struct position){event->incarnation, event->sequence});
    int r = object != NULL ? 0 : -1;
    if (r == 0 && event->has_model)
        r = set_digest(object, "model", &event->model);
    if (r == 0 && event->kind != OSCAR_EVENT_CLEARED) {
        r = set_digest(object, "page", &event->page);
        if (r == 0)
            r = set_digest(object, "parent", &event->parent);
        if (r == 0)
            r = json_object_set_new(object, "depth", json_integer(event->depth));
        if (r == 0)
            r = json_object_set_new(object, "form", json_string(forms[event->form % OSCAR_FORMS]));
    }
    if (r == 0 && snapshot)
        r = json_object_set_new(object, "snapshot", json_true());
    if (r == 0)
        return object;
    json_decref(object);
    return NULL;
}

static int print_pages(const struct oscar_admin_reply *reply, struct oscar_cause *cause) {
    int r = 0;
    for (uint32_t i = 0; i < reply->events && r == 0; i++) {
        struct oscar_event event = reply->event[i];
        event.incarnation = reply->snapshot.incarnation;
        event.sequence = reply->snapshot.sequence;
        r = ctl_print_json(event_json(&event, true), cause);
    }
    return r;
}

/* Takes the snapshot part by part; `print` shows it. The position is that of the first part: what changes meanwhile comes as events
 * behind it. A daemon that is started anew in between makes it begin again. */
static int take_snapshot(const struct ctl *ctl, bool print, struct position *ret, struct oscar_cause *cause) {
    struct oscar_admin_request request = {.verb = OSCAR_ADMIN_SNAPSHOT};
    struct position at = {0, 0};
    do {
        _cleanup_(oscar_admin_reply_free) struct oscar_admin_reply reply = {0};
        int r = admin_ask(ctl, &request, &reply, cause);
        if (r < 0)
            return r;
        if (request.cursor == 0 || reply.snapshot.incarnation != at.incarnation) {
            bool anew = request.cursor != 0;
            at = (struct position){reply.snapshot.incarnation, reply.snapshot.sequence};
            if (print && (r = ctl_print_json(position_json("resync", &at), cause)) < 0)
                return r;
            if (anew) {
                request.cursor = 0;
                continue;
            }
        }
        if (print && (r = print_pages(&reply, cause)) < 0)
            return r;
        request.cursor = reply.snapshot.next_cursor;
    } while (request.cursor != 0);
    *ret = at;
    return 0;
}

static int follow(const struct ctl *ctl, struct admin_subscription *subscription, struct position at,
                  struct oscar_cause *cause) {
    for (uint64_t seen = 0; ctl->count == 0 || seen < ctl->count;) {
        struct oscar_event event;
        int r = admin_next_event(subscription, &event, cause);
        if (r < 0)
            return r;
        if (event.incarnation == at.incarnation && event.sequence <= at.sequence)
            continue; /* the snapshot holds it */
        if (event.incarnation != at.incarnation || event.sequence != at.sequence + 1) {
            r = take_snapshot(ctl, true, &at, cause);
            if (r < 0)
                return r;
            if (event.incarnation != at.incarnation || event.sequence != at.sequence + 1)
                continue;
        }
        r = ctl_print_json(event_json(&event, false), cause);
        if (r < 0)
            return r;
        at.sequence = event.sequence;
        seen++;
    }
    return 0;
}

static void cleanup_subscription(struct admin_subscription **subscription) { admin_unsubscribe(*subscription); }

int ctl_events(const struct ctl *ctl, struct oscar_cause *cause) {
    struct position at = {0, 0};
    if (ctl->snapshot)
        return take_snapshot(ctl, true, &at, cause);
    _cleanup_(cleanup_subscription) struct admin_subscription *subscription = NULL;
    int r = admin_subscribe(ctl, &subscription, cause);
    if (r == 0) /* so that an event lost before the first one is a gap as well */
        r = take_snapshot(ctl, false, &at, cause);
    if (r == 0)
        r = ctl_print_json(position_json("following", &at), cause);
    return r != 0 ? r : follow(ctl, subscription, at, cause);
}
