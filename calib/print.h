/* SPDX-License-Identifier: Apache-2.0 */
/* Texts as JSON strings, and as lines for people. */
#ifndef OSCAR_CALIB_PRINT_H
#define OSCAR_CALIB_PRINT_H

#include <stdio.h>

/* In quotes, with what JSON wants escaped. */
void print_json_string(FILE *stream, const char *text);
/* A text of one or more lines to standard output, those after the first indented; control characters as '?'. */
void print_text_block(const char *text, int indent);

#endif
