/* SPDX-License-Identifier: Apache-2.0 */
#include "proto_golden.h"

#include <stdio.h>
#include <string.h>

#include "proto_test.h"

void assert_golden(const char *kind, const char *name, const struct oscar_digest *digest) {
    char line[256], expected[300], hex[2 * OSCAR_DIGEST_BYTES + 1];
    FILE *file = fopen(OSCAR_TEST_DATA "/proto/digests.txt", "re");
    assert_non_null(file);
    oscar_digest_hex(digest, hex);
    (void)snprintf(expected, sizeof(expected), "%s %s %s\n", kind, name, hex);
    size_t prefix = strlen(kind) + 1 + strlen(name) + 1;
    int found = 0;
    while (found == 0 && fgets(line, sizeof(line), file) != NULL)
        found = strncmp(line, expected, prefix) == 0;
    (void)fclose(file);
    assert_true(found);
    assert_string_equal(line, expected);
}
