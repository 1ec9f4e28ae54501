/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fuzz/round_trip.h"

#include <string.h>

#include "proto/text.h"
#include "tests/fuzz/fuzz.h"

#define MAX_STRUCT_BYTES 16384U
#define UNTOUCHED 0x5a

void require_refusal(int error, const struct oscar_cause *cause) {
    FUZZ_REQUIRE(error == OSCAR_ERR_PROTOCOL);
    FUZZ_REQUIRE(cause->text[0] != '\0' && oscar_text_valid(cause->text, strlen(cause->text)));
}

void round_trip(const struct message_codec *codec, const uint8_t *bytes, size_t size) {
    static _Alignas(16) uint8_t first[MAX_STRUCT_BYTES], second[MAX_STRUCT_BYTES];
    static uint8_t encoded[OSCAR_MAX_RECORD_PAYLOAD_BYTES], again[OSCAR_MAX_RECORD_PAYLOAD_BYTES];
    size_t encoded_bytes = 0, again_bytes = 0;
    struct oscar_cause cause = {0};
    FUZZ_REQUIRE(codec->struct_bytes <= MAX_STRUCT_BYTES);
    memset(first, UNTOUCHED, codec->struct_bytes);
    memset(second, UNTOUCHED, codec->struct_bytes);

    int r = codec->decode(bytes, size, first, &cause);
    if (r < 0) {
        require_refusal(r, &cause);
        FUZZ_REQUIRE(memcmp(first, second, codec->struct_bytes) == 0);
        return;
    }
    FUZZ_REQUIRE(codec->encode(first, encoded, sizeof(encoded), &encoded_bytes) == 0);
    FUZZ_REQUIRE(codec->decode(encoded, encoded_bytes, second, &cause) == 0);
    /* Compared as bytes on the wire: structs have padding. */
    FUZZ_REQUIRE(codec->encode(second, again, sizeof(again), &again_bytes) == 0);
    FUZZ_REQUIRE(encoded_bytes == again_bytes && memcmp(encoded, again, again_bytes) == 0);
}
