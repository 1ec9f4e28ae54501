/* SPDX-License-Identifier: Apache-2.0 */
/* What the tool says while it works: on standard error, so that results can be piped. */
#ifndef OSCAR_CALIB_PROGRESS_H
#define OSCAR_CALIB_PROGRESS_H

#include <stdint.h>

__attribute__((format(printf, 1, 2))) void say(const char *format, ...);

struct progress {
    const char *what; /* "layer" */
    uint64_t total, done, skipped;
    uint64_t start_ns, said_ns;
};

void progress_begin(struct progress *progress, const char *what, uint64_t total);
/* One more is done. A step that cost no work (`skipped`) does not count in the estimate of what is left. A terminal sees every
 * step on one line, anything else a line every ten seconds. */
void progress_step(struct progress *progress, int skipped);

#endif
