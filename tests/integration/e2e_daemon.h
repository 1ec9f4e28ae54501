/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon for each test, and its counters. A test's state is its struct test_daemon. Counters come straight from the administration
 * socket, without a program in between, so that they can be asked for often. What goes wrong here ends the test.
 */
#ifndef OSCAR_TESTS_E2E_DAEMON_H
#define OSCAR_TESTS_E2E_DAEMON_H

#include <stdint.h>

#include "proto/wire.h"
#include "tests/support/daemon.h"

/* For setup and teardown: chunks of 1 MiB at most, and a budget, which is e2e_scale() times as much. Stopping checks that nothing is in
 * use any more when the cache is flushed. */
int e2e_start(void **state, const char *budget);
int e2e_stop(void **state);
/* How much larger budgets are than on the host, and so what is to fill them. On a GPU 4: a chunk has 2 MiB at least there, and holds pages
 * of one form and, if dense, of one writer. */
unsigned e2e_scale(void);

/* A process that was spawned finds it in $OSCAR_SOCKET, as a client that is told no path does. */
const char *e2e_socket(const struct test_daemon *daemon);
/* Where calibration files lie. */
const char *e2e_calibrations(void);

/* Open descriptors of the daemon, but for those of chunks (on a GPU, of the driver): they stay with the pages that the cache keeps. */
int64_t e2e_descriptors(const struct test_daemon *daemon);

/* One metric now: `name`, summed over its labels, or `name{labels}`. One that does not exist ends the test. */
int64_t e2e_metric(const struct test_daemon *daemon, const char *name);
/* All of them at one moment: e2e_metric_of() looks into them. */
struct oscar_admin_reply e2e_metrics(const struct test_daemon *daemon);
int64_t e2e_metric_of(const struct oscar_admin_reply *metrics, const char *name);
/* Waits until it has this value; ends the test when it does not in half a minute. */
void e2e_wait_metric(const struct test_daemon *daemon, const char *name, int64_t value);
#define E2E_SINK "oscar_pages{form=\"sink\"}"
#define E2E_DENSE "oscar_pages{form=\"dense\"}"
#define E2E_PACKED "oscar_pages{form=\"packed\"}"
#define E2E_USED "oscar_memory_used_bytes"
#define E2E_USED_DENSE "oscar_memory_used_bytes{form=\"dense\"}"
#define E2E_ENDING "oscar_sequences_ending"
#define E2E_QUARANTINED "oscar_memory_quarantined_bytes"

/* Flushes all. */
struct oscar_admin_reply e2e_flush(const struct test_daemon *daemon);

#endif
