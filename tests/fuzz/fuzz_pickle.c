/* SPDX-License-Identifier: Apache-2.0 */
/* Any pickle: what is accepted holds together, whatever it says, and is made of no more than its own bytes. */
#include <string.h>

#include "calib/pickle.h"
#include "proto/text.h"
#include "tests/fuzz/fuzz.h"

static void check_text(const struct pickle_text *text, const uint8_t *bytes, size_t size) {
    const uint8_t *first = (const uint8_t *)text->bytes;
    FUZZ_REQUIRE(first >= bytes && text->length <= (size_t)(bytes + size - first));
}

static void check_tensor(const struct pickle_tensor *tensor, const uint8_t *bytes, size_t size) {
    uint64_t last = tensor->offset;
    FUZZ_REQUIRE(tensor->dims <= PICKLE_MAX_DIMS);
    FUZZ_REQUIRE(oscar_tensor_type_bytes(tensor->storage.type) > 0);
    check_text(&tensor->storage.key, bytes, size);
    for (uint32_t i = 0; i < tensor->dims; i++) {
        if (tensor->shape[i] == 0)
            return;
        last += (tensor->shape[i] - 1) * tensor->stride[i];
    }
    FUZZ_REQUIRE(last < tensor->storage.elements);
}

/* A container may hold itself: so each is entered to a depth, and its first items only. */
static void check_value(const struct pickle_value *value, unsigned depth, const uint8_t *bytes, size_t size) {
    switch (value->kind) {
    case PICKLE_TEXT:
        check_text(&value->text, bytes, size);
        break;
    case PICKLE_TENSOR:
        check_tensor(value->tensor, bytes, size);
        break;
    case PICKLE_DICT:
        FUZZ_REQUIRE(value->items.count % 2 == 0);
        (void)pickle_get(value, "layers");
        /* fall through */
    case PICKLE_LIST:
    case PICKLE_TUPLE:
        FUZZ_REQUIRE(value->items.count <= size);
        for (size_t i = 0; depth > 0 && i < value->items.count && i < 8; i++)
            check_value(value->items.at[i], depth - 1, bytes, size);
        break;
    default:
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    struct pickle *pickle = NULL;
    struct oscar_cause cause = {0};
    int r = pickle_parse(bytes, size, &pickle, &cause);
    if (r < 0) {
        FUZZ_REQUIRE((r == OSCAR_ERR_CORRUPT || r == OSCAR_ERR_UNSUPPORTED) && pickle == NULL);
        FUZZ_REQUIRE(cause.text[0] != '\0' && oscar_text_valid(cause.text, strlen(cause.text)));
        return 0;
    }
    check_value(pickle_root(pickle), 5, bytes, size);
    pickle_free(pickle);
    return 0;
}
