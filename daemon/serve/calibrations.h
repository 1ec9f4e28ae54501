/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calibrations, found and read by a thread of their own: files are large, disks are slow, and verifying rotations costs
 * seconds. A file is read once: its bytes and turn tables stay in sealed memfds, by digest, for as long as the daemon
 * runs.
 */
#ifndef OSCAR_DAEMON_SERVE_CALIBRATIONS_H
#define OSCAR_DAEMON_SERVE_CALIBRATIONS_H

#include <stdbool.h>

#include "proto/calibration.h"

struct calibrations;

/* What became of one calibrations_load(). */
struct calibrations_result {
    uint64_t ticket;
    int error; /* 0, or a code with its cause; then the rest is empty */
    struct oscar_cause cause;
    struct oscar_calibration *calibration; /* the taker's */
    int file_fd, turns_fd;                 /* the taker's; -1: none (built-in default; no rotating pairs) */
    bool read;                             /* the file was read from disk for this */
};

/* `directory` need not exist. `max_pages`: for how many pages turn tables are made. */
int calibrations_new(const char *directory, uint32_t max_pages, struct calibrations **ret, struct oscar_cause *cause);
void calibrations_free(struct calibrations *calibrations);          /* waits for the one that is being read */
int calibrations_event_fd(const struct calibrations *calibrations); /* readable when there are results */
/*
 * `name`: "" or "default" for the built-in one; a file of the directory, with or without .safetensors; or 64 hex
 * digits, the digest of a file there. OSCAR_ERR_CALIBRATION at once for a name that leaves the directory.
 */
int calibrations_load(struct calibrations *calibrations, const char *name, const struct oscar_geometry *geometry,
                      uint64_t ticket, struct oscar_cause *cause);
bool calibrations_take(struct calibrations *calibrations, struct calibrations_result *ret);
void calibrations_result_free(struct calibrations_result *result);

#endif
