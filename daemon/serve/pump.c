/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the store waits for: finished work (an eventfd), deadlines of parked calls (a timer), and fences. A fence is a
 * counter in memory that raises no event, so while one is awaited it is looked at every 50 us at first, then less and
 * less often, to 1 ms.
 *
 * And work that does not finish: a call that the device does not return from holds up nobody who needs no device, but it
 * cannot be ended either. After [device] watchdog_seconds the process is. Time is counted in turns of a timer that found the same
 * work as before, so that a process or a machine that was stopped for a while is not taken for a device that hangs.
 */
#include "daemon/serve/state.h"

#define FENCE_INTERVAL_MIN_NS UINT64_C(50000)
#define FENCE_INTERVAL_MAX_NS UINT64_C(1000000)
#define DEVICE_TICKS 8U /* of the device timer in watchdog_seconds */

static void poll_store(struct serve *serve) {
    store_poll(serve->store, loop_now_ns(serve->loop));
    models_retry(serve);
}

static void store_event(void *arg) { poll_store(arg); }

static void device_watch(struct serve *serve, uint64_t work) {
    uint64_t tick_ns = serve->config->watchdog_seconds * (UINT64_C(1000000000) / DEVICE_TICKS);
    serve->watched_work = work;
    loop_timer_set(serve->loop, serve->device_timer, work != 0 ? loop_now_ns(serve->loop) + tick_ns : 0);
}

static void device_due(void *arg) {
    struct serve *serve = arg;
    uint64_t work = store_oldest_work(serve->store);
    serve->watched_ticks = work != 0 && work == serve->watched_work ? serve->watched_ticks + 1 : 0;
    device_watch(serve, work);
    if (serve->watched_ticks < DEVICE_TICKS)
        return;
    struct oscar_cause cause;
    (void)oscar_fail(&cause, OSCAR_ERR_DEVICE, "a call has not returned for %llu s ([device] watchdog_seconds)",
                     (unsigned long long)serve->config->watchdog_seconds);
    serve_device_failed(serve, &cause);
}

static void fence_due(void *arg) {
    struct serve *serve = arg;
    serve->fence_timer_armed = false;
    if (serve->fence_interval_ns < FENCE_INTERVAL_MAX_NS)
        serve->fence_interval_ns *= 2;
    if (serve->fence_interval_ns > FENCE_INTERVAL_MAX_NS)
        serve->fence_interval_ns = FENCE_INTERVAL_MAX_NS;
    poll_store(serve);
}

int pump_open(struct serve *serve, struct oscar_cause *cause) {
    serve->fence_interval_ns = FENCE_INTERVAL_MIN_NS;
    int r = loop_watch(serve->loop, store_event_fd(serve->store), store_event, serve, &serve->store_watch);
    if (r == 0)
        r = loop_timer(serve->loop, fence_due, serve, &serve->fence_timer);
    if (r == 0)
        r = loop_timer(serve->loop, store_event, serve, &serve->deadline_timer);
    if (r == 0)
        r = loop_timer(serve->loop, device_due, serve, &serve->device_timer);
    if (r < 0)
        return oscar_fail(cause, r, "the store cannot be watched: %s", oscar_error_text(r));
    return 0;
}

void pump_close(struct serve *serve) {
    loop_remove(serve->loop, serve->store_watch);
    loop_remove(serve->loop, serve->fence_timer);
    loop_remove(serve->loop, serve->deadline_timer);
    loop_remove(serve->loop, serve->device_timer);
}

void pump_hasten(struct serve *serve) { serve->fence_interval_ns = FENCE_INTERVAL_MIN_NS; }

void pump_arm(struct serve *serve) {
    loop_timer_set(serve->loop, serve->deadline_timer, store_next_deadline(serve->store));
    if (serve->watched_work == 0 && serve->config->watchdog_seconds > 0)
        device_watch(serve, store_oldest_work(serve->store));
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
