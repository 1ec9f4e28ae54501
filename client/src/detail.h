/* SPDX-License-Identifier: Apache-2.0 */
/* The cause of the calling thread's last failure, as oscar_error_detail() shows it, and how calls keep time. */
#ifndef OSCAR_CLIENT_DETAIL_H
#define OSCAR_CLIENT_DETAIL_H

#include <stdint.h>
#include <time.h>

#include "proto/cause.h"

/* Of the calling thread: what oscar_fail() and the functions of the other rooms write their cause to. */
struct oscar_cause *oscar_detail(void);

#define OSCAR_NS_PER_MS UINT64_C(1000000)

static inline uint64_t oscar_clock_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* The deadline of a call that begins now. */
static inline uint64_t oscar_deadline_ns(uint64_t timeout_ms) {
    return oscar_clock_ns() + timeout_ms * OSCAR_NS_PER_MS;
}

#endif
