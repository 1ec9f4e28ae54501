/* SPDX-License-Identifier: Apache-2.0 */
/* The loop's timers: a binary heap by time, so that the engines only ever see the next one. */
#include "daemon/loop/engine.h"

static void place(struct loop *loop, struct loop_source *timer, size_t index) {
    loop->timers[index] = timer;
    timer->heap_index = index;
}

static void sift_up(struct loop *loop, struct loop_source *timer, size_t index) {
    while (index > 0) {
        size_t parent = (index - 1) / 2;
        if (loop->timers[parent]->at_ns <= timer->at_ns)
            break;
        place(loop, loop->timers[parent], index);
        index = parent;
    }
    place(loop, timer, index);
}

static void sift_down(struct loop *loop, struct loop_source *timer, size_t index) {
    for (;;) {
        size_t child = 2 * index + 1;
        if (child >= loop->timers_count)
            break;
        if (child + 1 < loop->timers_count && loop->timers[child + 1]->at_ns < loop->timers[child]->at_ns)
            child++;
        if (timer->at_ns <= loop->timers[child]->at_ns)
            break;
        place(loop, loop->timers[child], index);
        index = child;
    }
    place(loop, timer, index);
}

void loop_timer_disarm(struct loop *loop, struct loop_source *timer) {
    if (timer->at_ns == 0)
        return;
    size_t index = timer->heap_index;
    timer->at_ns = 0;
    struct loop_source *last = loop->timers[--loop->timers_count];
    if (last == timer)
        return;
    if (index > 0 && loop->timers[(index - 1) / 2]->at_ns > last->at_ns)
        sift_up(loop, last, index);
    else
        sift_down(loop, last, index);
}

int loop_timer_set(struct loop *loop, struct loop_source *timer, uint64_t at_ns) {
    if (timer->fd >= 0 || timer->removed)
        return OSCAR_ERR_INVALID;
    if (timer->at_ns == at_ns)
        return 0;
    loop_timer_disarm(loop, timer);
    if (at_ns == 0)
        return 0;
    timer->at_ns = at_ns;
    sift_up(loop, timer, loop->timers_count++);
    return 0;
}

uint64_t loop_timers_deadline(const struct loop *loop) {
    return loop->timers_count > 0 ? loop->timers[0]->at_ns : LOOP_NO_DEADLINE;
}

void loop_timers_run(struct loop *loop) {
    /* A callback may arm its timer for a time that has passed: it then runs in the next turn, after the others. */
    size_t limit = loop->timers_count;
    while (limit-- > 0 && loop->timers_count > 0 && loop->timers[0]->at_ns <= loop->now_ns) {
        struct loop_source *timer = loop->timers[0];
        loop_timer_disarm(loop, timer);
        timer->call(timer->arg);
    }
}
