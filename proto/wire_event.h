/* SPDX-License-Identifier: Apache-2.0 */
/* Events as they stand in a snapshot, too. */
#ifndef OSCAR_PROTO_WIRE_EVENT_H
#define OSCAR_PROTO_WIRE_EVENT_H

#include "proto/oscar.pb-c.h"
#include "proto/wire.h"

/* Points into `event`; false for a kind or form that does not exist. */
bool oscar_wire_give_event(const struct oscar_event *event, Oscar__V1__Event *ret);
int oscar_wire_take_event(const Oscar__V1__Event *message, struct oscar_event *ret, struct oscar_cause *cause);

#endif
