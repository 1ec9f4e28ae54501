/* SPDX-License-Identifier: Apache-2.0 */
#include "oscar/error.h"

#include <stddef.h>

struct error_entry {
    const char *name, *text, *remedy;
};

/* Indexed by the negated code; a gap in the values would leave an empty entry, which reads as unknown. */
static const struct error_entry entries[] = {[0] = {"OK", "success", "nothing to do"},
#define ERROR_ENTRY(error_name, value, error_text, error_remedy) [-(value)] = {#error_name, error_text, error_remedy},
                                             OSCAR_ERROR_TABLE(ERROR_ENTRY)
#undef ERROR_ENTRY
};

static const struct error_entry unknown = {"UNKNOWN", "unknown error",
                                           "client library and daemon differ in version: update the older one"};

static const struct error_entry *find(int error) {
    if (error > 0 || error <= -(int)(sizeof(entries) / sizeof(entries[0])) || entries[-error].name == NULL)
        return &unknown;
    return &entries[-error];
}

const char *oscar_error_name(int error) { return find(error)->name; }

const char *oscar_error_text(int error) { return find(error)->text; }

const char *oscar_error_remedy(int error) { return find(error)->remedy; }
