/* SPDX-License-Identifier: Apache-2.0 */
/* What a daemon may send: the first byte says whether the rest is a reply or a notice. */
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/round_trip.h"

static int decode_reply(const uint8_t *bytes, size_t size, void *ret, struct oscar_cause *cause) {
    return oscar_reply_decode(bytes, size, ret, cause);
}

static int encode_reply(const void *message, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    return oscar_reply_encode(message, buffer, capacity, ret_bytes);
}

static int decode_notice(const uint8_t *bytes, size_t size, void *ret, struct oscar_cause *cause) {
    return oscar_notice_decode(bytes, size, ret, cause);
}

static int encode_notice(const void *message, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    return oscar_notice_encode(message, buffer, capacity, ret_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const struct message_codec codecs[] = {
        {sizeof(struct oscar_reply), decode_reply, encode_reply},
        {sizeof(struct oscar_notice), decode_notice, encode_notice},
    };
    if (size > 0)
        round_trip(&codecs[bytes[0] % 2], bytes + 1, size - 1);
    return 0;
}
