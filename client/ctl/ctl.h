/* SPDX-License-Identifier: Apache-2.0 */
/* oscarctl: what its verbs share. */
#ifndef OSCAR_CTL_CTL_H
#define OSCAR_CTL_CTL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/wire.h"

enum exit_status {
    EXIT_OK = 0,
    EXIT_FAILED = 1,
    EXIT_USAGE = 2,
    EXIT_NO_DAEMON = 3,
    EXIT_NO_ANSWER = 4,
};

struct ctl {
    char requests[108], events[108]; /* paths of the daemon's sockets */
    uint32_t timeout_ms;
    bool json, snapshot;
    uint64_t count; /* events: end after so many, 0: never */
    bool has_model; /* flush: only this one */
    struct oscar_digest model;
};

/* The verbs: 0 or a negative error with its cause. */
int ctl_stats(const struct ctl *ctl, struct oscar_cause *cause);
int ctl_flush(const struct ctl *ctl, struct oscar_cause *cause);
int ctl_version(const struct ctl *ctl, struct oscar_cause *cause);
int ctl_events(const struct ctl *ctl, struct oscar_cause *cause);

/* Prints a JSON value as one line and gives up the reference. OSCAR_ERR_NO_MEMORY for NULL, OSCAR_ERR_IO. */
int ctl_print_json(json_t *value, struct oscar_cause *cause);

/* A value for people: "1.5 GiB", "12.3 ms", and what is only counted "1,234,567". */
#define CTL_VALUE_BYTES 64U
void ctl_format_value(uint64_t value, const char *unit, char ret[CTL_VALUE_BYTES]);

#endif
