/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/span.h"

#include <inttypes.h>

int span_check(uint64_t offset, uint64_t bytes, uint64_t unit, uint64_t range_bytes, struct oscar_cause *cause) {
    if (bytes == 0 || bytes % unit != 0 || offset % unit != 0 || bytes > range_bytes || offset > range_bytes - bytes)
        return oscar_fail(cause, OSCAR_ERR_INVALID,
                          "%" PRIu64 " bytes at %" PRIu64 " do not lie on multiples of %" PRIu64
                          " inside a range of %" PRIu64 " bytes",
                          bytes, offset, unit, range_bytes);
    return 0;
}

int span_check_chunks(const struct oscar_range_chunk *chunk, uint32_t chunks, uint64_t unit, uint64_t range_bytes,
                      struct oscar_cause *cause) {
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < chunks; i++) {
        r = span_check(chunk[i].offset, chunk[i].bytes, unit, range_bytes, cause);
        if (r == 0 && i > 0 && chunk[i].offset < chunk[i - 1].offset + chunk[i - 1].bytes)
            r = oscar_fail(cause, OSCAR_ERR_INVALID,
                           "a chunk at %" PRIu64 " after one of %" PRIu64 " bytes at %" PRIu64, chunk[i].offset,
                           chunk[i - 1].bytes, chunk[i - 1].offset);
    }
    return r;
}
