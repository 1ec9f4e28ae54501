/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The property of every message: what decodes can be encoded, decodes to the same again, and has one encoding. What does not decode
 * leaves its output alone and says why.
 */
#ifndef OSCAR_TESTS_FUZZ_ROUND_TRIP_H
#define OSCAR_TESTS_FUZZ_ROUND_TRIP_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"
#include "proto/wire.h"

struct message_codec {
    size_t struct_bytes;
    int (*decode)(const uint8_t *bytes, size_t size, void *ret, struct oscar_cause *cause);
    int (*encode)(const void *message, uint8_t *buffer, size_t capacity, size_t *ret_bytes);
};

void round_trip(const struct message_codec *codec, const uint8_t *bytes, size_t size);
/* A refused message: the code, and a cause of one clean line. */
void require_refusal(int error, const struct oscar_cause *cause);

#endif
