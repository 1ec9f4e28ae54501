/* SPDX-License-Identifier: Apache-2.0 */
/* Administration (nanomsg REP) and events (nanomsg PUB). admin.c is the only file that knows nanomsg. */
#ifndef OSCAR_DAEMON_SERVE_ADMIN_H
#define OSCAR_DAEMON_SERVE_ADMIN_H

#include "proto/cause.h"

struct admin;
struct oscar_event;
struct serve;

/* Claims both paths and begins to answer. OSCAR_ERR_BUSY / OSCAR_ERR_IO as endpoint_claim(). */
int admin_open(struct serve *serve, struct admin **ret, struct oscar_cause *cause);
void admin_close(struct admin *admin); /* NULL is fine */
/* Numbers the event and publishes it; never blocks: what a slow subscriber misses it sees by the gap. */
void admin_publish(struct admin *admin, const struct oscar_event *event);

#endif
