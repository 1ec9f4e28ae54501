/* SPDX-License-Identifier: Apache-2.0 */
/* Any file of torch.save(): the archive around a pickle, and the tensors that lie in it. CRCs are put right first: without
 * that nothing that has been changed would get as far as the pickle. */
#include <stdlib.h>
#include <string.h>

#include "calib/torch_file.h"
#include "calib/zip.h"
#include "proto/cleanup.h"
#include "proto/text.h"
#include "tests/fuzz/fuzz.h"

#define ENTRY_SIGNATURE "PK\1\2"
#define ENTRY_BYTES 46U
#define LOCAL_BYTES 30U
#define MOST_ELEMENTS 65536U

static uint32_t get(const uint8_t *at, unsigned width) {
    uint32_t value = 0;
    for (unsigned i = 0; i < width; i++)
        value |= (uint32_t)at[i] << (8 * i);
    return value;
}

static uint32_t crc32_of(const uint8_t *bytes, size_t size) {
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (unsigned bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ ((crc & 1U) != 0 ? 0xedb88320U : 0);
    }
    return ~crc;
}

/* Of every entry of 32 bits whose member lies in the file. */
static void mend(uint8_t *file, size_t size) {
    for (size_t at = 0; at + ENTRY_BYTES <= size; at++) {
        uint8_t *entry = file + at;
        size_t bytes = get(entry + 24, 4), header = get(entry + 42, 4);
        if (memcmp(entry, ENTRY_SIGNATURE, 4) != 0 || header > size || size - header < LOCAL_BYTES)
            continue;
        size_t data = header + LOCAL_BYTES + get(file + header + 26, 2) + get(file + header + 28, 2);
        if (data > size || bytes > size - data)
            continue;
        uint32_t crc = crc32_of(file + data, bytes);
        for (unsigned i = 0; i < 4; i++)
            entry[16 + i] = (uint8_t)(crc >> (8 * i));
    }
}

static void read_tensor(struct torch_file *file, const struct pickle_tensor *tensor) {
    struct oscar_cause cause = {0};
    uint64_t elements = 1;
    for (uint32_t i = 0; i < tensor->dims; i++)
        if (__builtin_mul_overflow(elements, tensor->shape[i], &elements) || elements > MOST_ELEMENTS)
            return;
    _cleanup_free_ float *read = malloc((size_t)elements * sizeof(*read));
    FUZZ_REQUIRE(read != NULL || elements == 0);
    int r = torch_file_read(file, tensor, read, elements, &cause);
    FUZZ_REQUIRE(r == 0 || cause.text[0] != '\0');
    FUZZ_REQUIRE(r != OSCAR_ERR_INVALID);
    for (uint64_t i = 0; r == 0 && i < elements; i++)
        fuzz_touch(&read[i]);
}

/* As an import looks for them: `layers: {id: {rotation}}`. */
static void read_layers(struct torch_file *file) {
    const struct pickle_value *layers = pickle_get(torch_file_root(file), "layers");
    if (layers == NULL || layers->kind != PICKLE_DICT)
        return;
    for (size_t i = 0; i < layers->items.count && i < 8; i += 2) {
        const struct pickle_value *rotation = pickle_get(layers->items.at[i + 1], "rotation");
        if (rotation != NULL && rotation->kind == PICKLE_TENSOR)
            read_tensor(file, rotation->tensor);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    struct torch_file *file = NULL;
    struct oscar_cause cause = {0};
    _cleanup_free_ uint8_t *copy = malloc(size);
    FUZZ_REQUIRE(copy != NULL || size == 0);
    if (size > 0)
        memcpy(copy, bytes, size);
    mend(copy, size);
    int r = torch_file_parse(copy, size, &file, &cause);
    if (r < 0) {
        FUZZ_REQUIRE((r == OSCAR_ERR_CORRUPT || r == OSCAR_ERR_UNSUPPORTED || r == OSCAR_ERR_NOT_FOUND) &&
                     file == NULL);
        FUZZ_REQUIRE(cause.text[0] != '\0' && oscar_text_valid(cause.text, strlen(cause.text)));
        return 0;
    }
    read_layers(file);
    torch_file_free(file);
    return 0;
}
