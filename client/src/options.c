/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/options.h"

#include <stdint.h>
#include <string.h>

#include "client/src/detail.h"

int oscar_options_read(const void *options, size_t required, size_t size, const char *what, void *ret) {
    memset(ret, 0, size);
    if (options == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "%s: NULL", what);
    size_t given;
    memcpy(&given, options, sizeof(given));
    if (given < required || given > SIZE_MAX / 2)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "%s.size is %zu, at least %zu is needed: set it to sizeof",
                          what, given, required);
    for (size_t i = size; i < given; i++)
        if (((const unsigned char *)options)[i] != 0)
            return oscar_fail(oscar_detail(), OSCAR_ERR_UNSUPPORTED,
                              "%s has %zu bytes with a field in use beyond the %zu that this library knows", what,
                              given, size);
    memcpy(ret, options, given < size ? given : size);
    return 0;
}

int oscar_info_write(const void *info, size_t size, const char *what, void *ret) {
    if (ret == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "%s: NULL", what);
    size_t given;
    memcpy(&given, ret, sizeof(given));
    if (given < sizeof(given) || given > SIZE_MAX / 2)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "%s.size is %zu: set it to sizeof", what, given);
    memcpy(ret, info, given < size ? given : size);
    if (given > size)
        memset((unsigned char *)ret + size, 0, given - size);
    memcpy(ret, &given, sizeof(given));
    return 0;
}
