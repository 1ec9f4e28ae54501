/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the two ends fit together. */
#include "proto/version.h"

#include <inttypes.h>
#include <stdio.h>

#include "client/ctl/admin.h"
#include "proto/cleanup.h"

static json_t *as_json(const struct oscar_admin_reply *reply) {
    char incarnation[17]; /* a text: 64 bits do not survive every reader of JSON numbers */
    (void)snprintf(incarnation, sizeof(incarnation), "%016" PRIx64, reply->version.incarnation);
    return json_pack("{s:{s:s, s:i, s:i}, s:{s:s, s:i, s:i, s:s, s:s, s:s, s:s}}",           /* */
                     "client",                                                               /* */
                     "version", OSCAR_VERSION_STRING,                                        /* */
                     "major", (int)OSCAR_PROTOCOL_MAJOR, "minor", (int)OSCAR_PROTOCOL_MINOR, /* */
                     "daemon",                                                               /* */
                     "version", reply->version.version,                                      /* */
                     "major", (int)reply->version.major, "minor", (int)reply->version.minor, /* */
                     "backend", reply->version.backend, "device", reply->version.device,     /* */
                     "io_engine", reply->version.io_engine, "incarnation", incarnation);
}

int ctl_version(const struct ctl *ctl, struct oscar_cause *cause) {
    _cleanup_(oscar_admin_reply_free) struct oscar_admin_reply reply = {0};
    const struct oscar_admin_request request = {.verb = OSCAR_ADMIN_VERSION};
    if (!ctl->json)
        printf("oscarctl  %s, protocol %u.%u\n", OSCAR_VERSION_STRING, OSCAR_PROTOCOL_MAJOR, OSCAR_PROTOCOL_MINOR);
    int r = admin_ask(ctl, &request, &reply, cause);
    if (r < 0)
        return r;
    if (ctl->json)
        return ctl_print_json(as_json(&reply), cause);
    printf("oscard    %s, protocol %" PRIu32 ".%" PRIu32 ", backend %s, device %s, %s, incarnation %" PRIx64 "\n",
           reply.version.version, reply.version.major, reply.version.minor, reply.version.backend, reply.version.device,
           reply.version.io_engine, reply.version.incarnation);
    return 0;
}
