/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/progress.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define QUIET_NS UINT64_C(10000000000)

void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)fprintf(stderr, "oscar-calib: ");
    (void)vfprintf(stderr, format, arguments);
    (void)fputc('\n', stderr);
    va_end(arguments);
}

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void progress_begin(struct progress *progress, const char *what, uint64_t total) {
    uint64_t now = now_ns();
    *progress = (struct progress){.what = what, .total = total, .start_ns = now, .said_ns = now};
}

void progress_step(struct progress *progress, int skipped) {
    const bool terminal = isatty(STDERR_FILENO) == 1;
    const uint64_t now = now_ns();
    progress->done++;
    progress->skipped += skipped != 0;
    if (!terminal && now - progress->said_ns < QUIET_NS)
        return;
    progress->said_ns = now;
    uint64_t worked = progress->done - progress->skipped;
    double left = worked == 0 ? 0
                              : (double)(now - progress->start_ns) * 1e-9 / (double)worked *
                                    (double)(progress->total - progress->done);
    (void)fprintf(stderr, "%soscar-calib: %s %" PRIu64 " of %" PRIu64 ", %.0f s left%s", terminal ? "\r" : "",
                  progress->what, progress->done, progress->total, left,
                  !terminal                          ? "\n"
                  : progress->done < progress->total ? "   "
                                                     : "   \n");
}
