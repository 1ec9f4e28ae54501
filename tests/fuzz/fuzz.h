/* SPDX-License-Identifier: Apache-2.0 */
/* What every fuzz target shares: its entry, and properties that must hold for any input. */
#ifndef OSCAR_TESTS_FUZZ_H
#define OSCAR_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* An assertion in every build: libFuzzer keeps the input of a process that aborts. */
#define FUZZ_REQUIRE(condition)                                                                                        \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            (void)fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);                       \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Reads a value where the sanitizers see it. */
static inline void fuzz_touch(const void *byte) { (void)*(const volatile uint8_t *)byte; }

#endif
