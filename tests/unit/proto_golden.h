/* SPDX-License-Identifier: Apache-2.0 */
/* The golden digests of tests/data/proto/digests.txt. */
#ifndef OSCAR_TESTS_PROTO_GOLDEN_H
#define OSCAR_TESTS_PROTO_GOLDEN_H

#include "proto/digest.h"

/* Fails the test unless the line `kind name` has this digest. */
void assert_golden(const char *kind, const char *name, const struct oscar_digest *digest);

#endif
