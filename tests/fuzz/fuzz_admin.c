/* SPDX-License-Identifier: Apache-2.0 */
/* Administration: the first byte says whether the rest is a request, a reply or an event. */
#include <string.h>

#include "proto/cleanup.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/round_trip.h"

static int decode_event(const uint8_t *bytes, size_t size, void *ret, struct oscar_cause *cause) {
    return oscar_event_decode(bytes, size, ret, cause);
}

static int encode_event(const void *message, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    return oscar_event_encode(message, buffer, capacity, ret_bytes);
}

static int decode_request(const uint8_t *bytes, size_t size, void *ret, struct oscar_cause *cause) {
    return oscar_admin_request_decode(bytes, size, ret, cause);
}

static int encode_request(const void *message, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    _cleanup_free_ uint8_t *encoded = NULL;
    int r = oscar_admin_request_encode(message, &encoded, ret_bytes);
    if (r < 0)
        return r;
    FUZZ_REQUIRE(*ret_bytes <= capacity);
    memcpy(buffer, encoded, *ret_bytes);
    return 0;
}

/* A reply has its lists elsewhere: it is compared by its encoding. */
static void reply_round_trip(const uint8_t *bytes, size_t size) {
    _cleanup_(oscar_admin_reply_free) struct oscar_admin_reply first = {0}, second = {0};
    _cleanup_free_ uint8_t *encoded = NULL, *again = NULL;
    size_t encoded_bytes = 0, again_bytes = 0;
    struct oscar_cause cause = {0};
    int r = oscar_admin_reply_decode(bytes, size, &first, &cause);
    if (r < 0) {
        require_refusal(r, &cause);
        FUZZ_REQUIRE(first.metric == NULL && first.event == NULL);
        return;
    }
    FUZZ_REQUIRE(oscar_admin_reply_encode(&first, &encoded, &encoded_bytes) == 0);
    FUZZ_REQUIRE(oscar_admin_reply_decode(encoded, encoded_bytes, &second, &cause) == 0);
    FUZZ_REQUIRE(oscar_admin_reply_encode(&second, &again, &again_bytes) == 0);
    FUZZ_REQUIRE(encoded_bytes == again_bytes && memcmp(encoded, again, again_bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const struct message_codec request = {sizeof(struct oscar_admin_request), decode_request, encode_request},
                                      event = {sizeof(struct oscar_event), decode_event, encode_event};
    if (size == 0)
        return 0;
    switch (bytes[0] % 3) {
    case 0:
        round_trip(&request, bytes + 1, size - 1);
        break;
    case 1:
        reply_round_trip(bytes + 1, size - 1);
        break;
    default:
        round_trip(&event, bytes + 1, size - 1);
        break;
    }
    return 0;
}
