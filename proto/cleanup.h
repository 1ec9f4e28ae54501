/* SPDX-License-Identifier: Apache-2.0 */
/* Scoped ownership: what a function holds is released on every way out of it, unless it is taken out and handed on. */
#ifndef OSCAR_PROTO_CLEANUP_H
#define OSCAR_PROTO_CLEANUP_H

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static inline void oscar_cleanup_free(void *pointer_to_pointer) { free(*(void **)pointer_to_pointer); }

/* Keeps errno: the failure that leads here is the one to report. */
static inline void oscar_cleanup_close(const int *fd) {
    if (*fd >= 0) {
        int saved = errno;
        (void)close(*fd);
        errno = saved;
    }
}

#define _cleanup_(function) __attribute__((cleanup(function)))
#define _cleanup_free_ _cleanup_(oscar_cleanup_free)
#define _cleanup_close_ _cleanup_(oscar_cleanup_close)

/* Hands a value on and leaves "nothing" behind: `*ret = TAKE_PTR(buffer);` */
#define TAKE_PTR(pointer)                                                                                              \
    ({                                                                                                                 \
        __typeof__(pointer) *take_from_ = &(pointer);                                                                  \
        __typeof__(pointer) taken_ = *take_from_;                                                                      \
        *take_from_ = NULL;                                                                                            \
        taken_;                                                                                                        \
    })
#define TAKE_FD(fd)                                                                                                    \
    ({                                                                                                                 \
        int *take_from_ = &(fd);                                                                                       \
        int taken_ = *take_from_;                                                                                      \
        *take_from_ = -1;                                                                                              \
        taken_;                                                                                                        \
    })

#endif
