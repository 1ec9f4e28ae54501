/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/cause.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/text.h"

int(oscar_fail)(struct oscar_cause *cause, int error, const char *format, ...) {
    if (cause == NULL)
        return error;
    int saved = errno; /* for %m in the format, and for a caller that looks at it afterwards */
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(cause->text, sizeof(cause->text), format, arguments) < 0)
        cause->text[0] = '\0';
    va_end(arguments);
    /* Causes quote names from files and peers: they must stay one clean line wherever they are shown. */
    oscar_text_clean(cause->text, strlen(cause->text));
    errno = saved;
    return error;
}
