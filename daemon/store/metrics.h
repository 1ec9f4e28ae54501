/* SPDX-License-Identifier: Apache-2.0 */
/* The store's metrics: one table gives name, labels, unit, help, kind and value of each. */
#ifndef OSCAR_DAEMON_STORE_METRICS_H
#define OSCAR_DAEMON_STORE_METRICS_H

#include <stdbool.h>
#include <stdint.h>

struct store;

struct store_metric {
    const char *name, *labels, *unit, *help;
    bool counter; /* only ever grows; else a gauge */
    uint64_t (*value)(const struct store *store);
};

extern const struct store_metric store_metric_table[];
extern const uint32_t store_metric_count;

#endif
