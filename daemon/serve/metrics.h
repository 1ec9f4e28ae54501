/* SPDX-License-Identifier: Apache-2.0 */
/* What the server counts about itself. The store's metrics are the store's. */
#ifndef OSCAR_DAEMON_SERVE_METRICS_H
#define OSCAR_DAEMON_SERVE_METRICS_H

#include "proto/wire.h"

struct serve;

struct serve_counters {
    uint64_t connections;     /* accepted, all time */
    uint64_t refused_clients; /* over [limits] clients */
    uint64_t dropped_silent;
    uint64_t hellos;
    uint64_t version_refused;
    uint64_t requests[OSCAR_VERBS];
    uint64_t request_errors;
    uint64_t protocol_errors;
    uint64_t queue_overflows;
    uint64_t chunks_announced;
    uint64_t calibrations_loaded;
    uint64_t admin_requests;
    uint64_t events, events_failed;
    uint64_t turns;
    uint64_t turn_ns_max; /* longest time that the loop was busy without a wait */
};

uint32_t serve_metrics(const struct serve *serve, struct oscar_metric *ret, uint32_t capacity);

#endif
