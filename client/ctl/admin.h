/* SPDX-License-Identifier: Apache-2.0 */
/* Speaking to the daemon's administration: the only part that knows nanomsg. */
#ifndef OSCAR_CTL_ADMIN_H
#define OSCAR_CTL_ADMIN_H

#include "client/ctl/ctl.h"

/* Asks and waits for the answer: OSCAR_ERR_NOT_RUNNING, _PERMISSION, _TIMEOUT, _PROTOCOL, or what the daemon answers. The reply
 * is the caller's to oscar_admin_reply_free(). */
int admin_ask(const struct ctl *ctl, const struct oscar_admin_request *request, struct oscar_admin_reply *ret,
              struct oscar_cause *cause);

struct admin_subscription;
/* Events are kept from here on, as far as there is room for them. */
int admin_subscribe(const struct ctl *ctl, struct admin_subscription **ret, struct oscar_cause *cause);
void admin_unsubscribe(struct admin_subscription *subscription); /* NULL is fine */
/* Waits for the next event, without an end. 0, OSCAR_ERR_PROTOCOL for a message that is none, OSCAR_ERR_IO. */
int admin_next_event(struct admin_subscription *subscription, struct oscar_event *ret, struct oscar_cause *cause);

#endif
