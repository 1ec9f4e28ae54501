/* SPDX-License-Identifier: Apache-2.0 */
/* An oscard of the program's own, in a directory of its own, and oscarctl beside it. What fails is told on standard error. */
#ifndef OSCAR_TESTS_DEMO_PRIVATE_DAEMON_H
#define OSCAR_TESTS_DEMO_PRIVATE_DAEMON_H

#include <jansson.h>
#include <stdint.h>

#include "tests/support/worker_process.h"

struct private_daemon {
    const char *oscard, *oscarctl; /* programs */
    const char *settings;          /* lines of the configuration file after `[daemon]` and the directory */
    char directory[64];            /* made by the start */
    char socket[96];               /* of the workers */
    char admin_socket[96];         /* of oscarctl */
    struct worker_process process;
};

/* Starts it and waits until it says that it is ready. 0 or -1; private_daemon_end() either way. */
int private_daemon_start(struct private_daemon *daemon);
/* SIGTERM; 0 when it then exits with status 0 in time. */
int private_daemon_stop(struct private_daemon *daemon);
/* Kills it if it still runs and removes the directory. Fine for one that never started. */
void private_daemon_end(struct private_daemon *daemon);

/* Runs oscarctl with one or two words (`option` may be NULL) and takes its output. */
int private_daemon_ctl(struct private_daemon *daemon, const char *verb, const char *option, char *ret_output,
                       size_t size);
/* `oscarctl stats --json`: the caller's to json_decref(). */
json_t *private_daemon_stats(struct private_daemon *daemon);
/* `name`, summed over its labels, or `name{labels}`; -1 where there is none. */
int64_t private_daemon_metric(const json_t *stats, const char *name);

#endif
