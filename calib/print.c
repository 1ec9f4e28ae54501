/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/print.h"

void print_json_string(FILE *stream, const char *text) {
    (void)fputc('"', stream);
    for (const unsigned char *at = (const unsigned char *)text; *at != '\0'; at++) {
        if (*at == '"' || *at == '\\')
            (void)fprintf(stream, "\\%c", *at);
        else if (*at < 0x20)
            (void)fprintf(stream, "\\u%04x", *at);
        else
            (void)fputc(*at, stream);
    }
    (void)fputc('"', stream);
}

void print_text_block(const char *text, int indent) {
    for (const unsigned char *at = (const unsigned char *)text; *at != '\0'; at++) {
        if (*at == '\n')
            printf("\n%*s", indent, "");
        else
            putchar(*at < 0x20 || *at == 0x7f ? '?' : *at);
    }
    putchar('\n');
}
