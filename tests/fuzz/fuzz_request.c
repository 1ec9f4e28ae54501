/* SPDX-License-Identifier: Apache-2.0 */
/* What a client may send: the payload of a request. */
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/round_trip.h"

static int decode(const uint8_t *bytes, size_t size, void *ret, struct oscar_cause *cause) {
    return oscar_request_decode(bytes, size, ret, cause);
}

static int encode(const void *message, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    return oscar_request_encode(message, buffer, capacity, ret_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const struct message_codec codec = {sizeof(struct oscar_request), decode, encode};
    round_trip(&codec, bytes, size);
    return 0;
}
