/* SPDX-License-Identifier: Apache-2.0 */
/* Emptying the cache. What somebody reads is only taken out of look-up now, and freed after the last reader: deferred. */
#include <inttypes.h>
#include <stdio.h>

#include "client/ctl/admin.h"
#include "proto/cleanup.h"

int ctl_flush(const struct ctl *ctl, struct oscar_cause *cause) {
    _cleanup_(oscar_admin_reply_free) struct oscar_admin_reply reply = {0};
    const struct oscar_admin_request request = {
        .verb = OSCAR_ADMIN_FLUSH, .flush_model = ctl->has_model, .model = ctl->model};
    int r = admin_ask(ctl, &request, &reply, cause);
    if (r < 0)
        return r;
    if (ctl->json)
        return ctl_print_json(json_pack("{s:I, s:I, s:I, s:I}",                                   /* */
                                        "pages_freed", (json_int_t)reply.flush.pages_freed,       /* */
                                        "bytes_freed", (json_int_t)reply.flush.bytes_freed,       /* */
                                        "pages_deferred", (json_int_t)reply.flush.pages_deferred, /* */
                                        "bytes_deferred", (json_int_t)reply.flush.bytes_deferred),
                              cause);
    char freed[CTL_VALUE_BYTES], deferred[CTL_VALUE_BYTES];
    ctl_format_value(reply.flush.bytes_freed, "bytes", freed);
    ctl_format_value(reply.flush.bytes_deferred, "bytes", deferred);
    printf("freed     %" PRIu64 " pages, %s\n", reply.flush.pages_freed, freed);
    printf("deferred  %" PRIu64 " pages, %s%s\n", reply.flush.pages_deferred, deferred,
           reply.flush.pages_deferred > 0 ? ": they can no longer be found, and are freed after their last reader"
                                          : "");
    return 0;
}
