/* SPDX-License-Identifier: Apache-2.0 */
/* How a failure travels up: a code by return value and, where the caller wants it, its exact cause as text. */
#ifndef OSCAR_PROTO_CAUSE_H
#define OSCAR_PROTO_CAUSE_H

#include "oscar/error.h"

#define OSCAR_CAUSE_BYTES 256U

struct oscar_cause {
    char text[OSCAR_CAUSE_BYTES]; /* empty, or one line without a newline */
};

/* Writes the formatted cause (cut to fit; `cause` may be NULL) and returns `error`:
 * `return oscar_fail(cause, OSCAR_ERR_IO, "...")`. */
__attribute__((format(printf, 3, 4))) int oscar_fail(struct oscar_cause *cause, int error, const char *format, ...);

/* The call, with its value in sight: a compiler or analyser, which sees one file at a time, so knows which way a caller goes on
 * and does not take the outputs of the failed call for unset. */
#define oscar_fail(cause, error, ...)                                                                                  \
    __extension__({                                                                                                    \
        int fail_error_ = (error);                                                                                     \
        (void)(oscar_fail)(cause, fail_error_, __VA_ARGS__);                                                           \
        fail_error_;                                                                                                   \
    })

#endif
