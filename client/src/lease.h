/* SPDX-License-Identifier: Apache-2.0 */
/* A lease: pages that stay until it is closed, or its owner's connection ends. */
#ifndef OSCAR_CLIENT_LEASE_H
#define OSCAR_CLIENT_LEASE_H

#include "client/src/model.h"
#include "proto/wire.h"

struct oscar_lease {
    struct oscar_model *model;
    LIST_ENTRY(oscar_lease) in_model;
    bool named; /* it has a secret: its hit was not 0 */
    uint8_t secret[OSCAR_LEASE_SECRET_BYTES];
    struct oscar_call *closing;
};

/* Closes it here and, until the deadline, in the daemon. */
void oscar_lease_end(struct oscar_lease *lease, uint64_t deadline);

#endif
