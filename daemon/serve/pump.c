/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the store waits for: finished work (an eventfd), deadlines of parked calls (a timer), and fences. A fence is a
 * counter in memory that raises no event, so while one is awaited it is looked at every 50 us at first, then less and
 * less often, to 1 ms.
 */
#include "daemon/serve/state.h"

#define FENCE_INTERVAL_MIN_NS UINT64_C(50000)
#define FENCE_INTERVAL_MAX_NS UINT64_C(1000000)

static void store_event(void *arg) {
    struct serve *serve = arg;
    store_poll(serve->store, loop_now_ns(serve->loop));
}

static void fence_due(void *arg) {
    struct serve *serve = arg;
    serve->fence_timer_armed = false;
    if (serve->fence_interval_ns < FENCE_INTERVAL_MAX_NS)
        serve->fence_interval_ns *= 2;
    if (serve->fence_interval_ns > FENCE_INTERVAL_MAX_NS)
        serve->fence_interval_ns = FENCE_INTERVAL_MAX_NS;
    store_poll(serve->store, loop_now_ns(serve->loop));
}

int pump_open(struct serve *serve, struct oscar_cause *cause) {
    serve->fence_interval_ns = FENCE_INTERVAL_MIN_NS;
    int r = loop_watch(serve->loop, store_event_fd(serve->store), store_event, serve, &serve->store_watch);
    if (r == 0)
        r = loop_timer(serve->loop, fence_due, serve, &serve->fence_timer);
    if (r == 0)
        r = loop_timer(serve->loop, store_event, serve, &serve->deadline_timer);
    if (r < 0)
        return oscar_fail(cause, r, "the store cannot be watched: %s", oscar_error_text(r));
    return 0;
}

void pump_close(struct serve *serve) {
    loop_remove(serve->loop, serve->store_watch);
    loop_remove(serve->loop, serve->fence_timer);
    loop_remove(serve->loop, serve->deadline_timer);
}

void pump_hasten(struct serve *serve) { serve->fence_interval_ns = FENCE_INTERVAL_MIN_NS; }

void pump_arm(struct serve *serve) {
    loop_timer_set(serve->loop, serve->deadline_timer, store_next_deadline(serve->store));
    bool pending = store_poll_pending(serve->store);
    if (!pending) {
        serve->fence_interval_ns = FENCE_INTERVAL_MIN_NS;
        if (serve->fence_timer_armed)
            loop_timer_set(serve->loop, serve->fence_timer, 0);
        serve->fence_timer_armed = false;
    } else if (!serve->fence_timer_armed) {
        loop_timer_set(serve->loop, serve->fence_timer, loop_now_ns(serve->loop) + serve->fence_interval_ns);
        serve->fence_timer_armed = true;
    }
}
