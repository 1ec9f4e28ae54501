/* SPDX-License-Identifier: Apache-2.0 */
/* What may stand in a name or a cause: UTF-8 without control characters, so that it can go to a log, a label and the wire. */
#ifndef OSCAR_PROTO_TEXT_H
#define OSCAR_PROTO_TEXT_H

#include <stdbool.h>
#include <stddef.h>

bool oscar_text_valid(const char *text, size_t length);

/* Replaces every byte that oscar_text_valid() would refuse by '?'. */
void oscar_text_clean(char *text, size_t length);

#endif
