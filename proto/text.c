/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/text.h"

#include <stdint.h>

/* Bytes of the well-formed character at `text` (Unicode, table 3-7: no overlong forms, no surrogates), or 0. */
static size_t character_bytes(const uint8_t *text, size_t length) {
    uint8_t lead = text[0];
    if (lead < 0x80)
        return lead >= 0x20 && lead != 0x7f ? 1 : 0;
    size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || bytes > length)
        return 0;
    uint8_t low = 0x80, high = 0xbf;
    switch (lead) {
    case 0xe0:
        low = 0xa0;
        break;
    case 0xed:
        high = 0x9f;
        break;
    case 0xf0:
        low = 0x90;
        break;
    case 0xf4:
        high = 0x8f;
        break;
    case 0xc2: /* U+0080..U+009F are control characters too */
        low = 0xa0;
        break;
    default:
        break;
    }
    if (text[1] < low || text[1] > high)
        return 0;
    for (size_t i = 2; i < bytes; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    }
    return bytes;
}

bool oscar_text_valid(const char *text, size_t length) {
    for (size_t i = 0; i < length;) {
        size_t bytes = character_bytes((const uint8_t *)text + i, length - i);
        if (bytes == 0)
            return false;
        i += bytes;
    }
    return true;
}

void oscar_text_clean(char *text, size_t length) {
    for (size_t i = 0; i < length;) {
        size_t bytes = character_bytes((const uint8_t *)text + i, length - i);
        if (bytes == 0)
            text[i] = '?';
        i += bytes == 0 ? 1 : bytes;
    }
}
