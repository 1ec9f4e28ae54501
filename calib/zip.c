/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/zip.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"

/* Records, by their signature and the bytes of their fixed part (APPNOTE 6.3, sections 4.3.7 to 4.3.16). */
#define LOCAL_SIGNATURE 0x04034b50U
#define LOCAL_BYTES 30U
#define ENTRY_SIGNATURE 0x02014b50U
#define ENTRY_BYTES 46U
#define END_SIGNATURE 0x06054b50U
#define END_BYTES 22U
#define END64_SIGNATURE 0x06064b50U
#define END64_BYTES 56U
#define LOCATOR_SIGNATURE 0x07064b50U
#define LOCATOR_BYTES 20U

#define ZIP64_EXTRA 1U /* id of the extra field whose 64-bit values stand for those that are all ones */
#define ENCRYPTED 1U   /* flag */
#define MAX_COMMENT_BYTES 65535U

struct member {
    const char *name;
    size_t name_length;
    uint64_t header; /* offset of its local header */
    uint64_t size, stored_size;
    uint32_t crc;
    uint16_t flags, method;
    bool checked; /* its CRC was right */
};

struct zip {
    const uint8_t *bytes;
    size_t size;
    size_t members;
    struct member *member; /* sorted by name */
};

struct directory {
    uint64_t offset, size, entries;
};

static uint16_t get16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }
static uint32_t get32(const uint8_t *at) { return get16(at) | (uint32_t)get16(at + 2) << 16; }
static uint64_t get64(const uint8_t *at) { return get32(at) | (uint64_t)get32(at + 4) << 32; }

/* --- the directory ------------------------------------------------------------------------------------------------ */

/* The record at the end of the archive: nothing but a comment, whose length it names, may follow it. */
static const uint8_t *find_end(const uint8_t *bytes, size_t size) {
    for (size_t comment = 0; comment <= MAX_COMMENT_BYTES && comment + END_BYTES <= size; comment++) {
        const uint8_t *at = bytes + size - END_BYTES - comment;
        if (get32(at) == END_SIGNATURE && get16(at + 20) == comment)
            return at;
    }
    return NULL;
}

static int find_directory64(const uint8_t *bytes, size_t end, struct directory *ret, struct oscar_cause *cause) {
    if (end < LOCATOR_BYTES || get32(bytes + end - LOCATOR_BYTES) != LOCATOR_SIGNATURE)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "zip64 archive without its locator");
    uint64_t at = get64(bytes + end - LOCATOR_BYTES + 8);
    if (at > end || end - at < END64_BYTES || get32(bytes + at) != END64_SIGNATURE)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "no zip64 directory at byte %" PRIu64, at);
    *ret = (struct directory){
        .entries = get64(bytes + at + 32), .size = get64(bytes + at + 40), .offset = get64(bytes + at + 48)};
    return 0;
}

static int find_directory(const uint8_t *bytes, size_t size, struct directory *ret, struct oscar_cause *cause) {
    const uint8_t *end = find_end(bytes, size);
    if (end == NULL)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "no zip archive, or cut: there is no directory at its end (torch.save() of PyTorch 1.6 and "
                          "later writes one)");
    size_t before = (size_t)(end - bytes);
    struct directory directory = {.entries = get16(end + 10), .size = get32(end + 12), .offset = get32(end + 16)};
    if (directory.entries == UINT16_MAX || directory.size == UINT32_MAX || directory.offset == UINT32_MAX) {
        int r = find_directory64(bytes, before, &directory, cause);
        if (r < 0)
            return r;
    }
    if (directory.offset > before || directory.size > before - directory.offset ||
        directory.entries > directory.size / ENTRY_BYTES)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "zip directory of %" PRIu64 " entries, %" PRIu64 " bytes at byte %" PRIu64
                          " does not fit in %zu bytes",
                          directory.entries, directory.size, directory.offset, before);
    *ret = directory;
    return 0;
}

/* Values of 32 bits that are all ones stand in the extra field, in this order. */
static bool read_extra(struct member *member, const uint8_t *extra, size_t length) {
    uint64_t *const wide[] = {&member->size, &member->stored_size, &member->header};
    size_t missing = 0;
    for (size_t i = 0; i < 3; i++)
        missing += *wide[i] == UINT32_MAX;
    while (missing > 0 && length >= 4) {
        size_t bytes = get16(extra + 2);
        if (bytes > length - 4)
            return false;
        if (get16(extra) == ZIP64_EXTRA) {
            const uint8_t *at = extra + 4;
            if (bytes < 8 * missing)
                return false;
            for (size_t i = 0; i < 3; i++) {
                if (*wide[i] == UINT32_MAX) {
                    *wide[i] = get64(at);
                    at += 8;
                }
            }
            return true;
        }
        extra += 4 + bytes;
        length -= 4 + bytes;
    }
    return missing == 0;
}

/* Reads the entry at `at` and moves it on. */
static int read_entry(const uint8_t **at, const uint8_t *end, struct member *ret, struct oscar_cause *cause) {
    const uint8_t *entry = *at;
    size_t left = (size_t)(end - entry);
    if (left < ENTRY_BYTES || get32(entry) != ENTRY_SIGNATURE)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "zip directory: an entry is cut or has no signature");
    size_t name_length = get16(entry + 28), extra_length = get16(entry + 30), comment_length = get16(entry + 32);
    if (name_length + extra_length + comment_length > left - ENTRY_BYTES)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "zip directory: an entry runs over its end");
    const uint8_t *name = entry + ENTRY_BYTES;
    *ret = (struct member){
        .name = (const char *)name,
        .name_length = name_length,
        .flags = get16(entry + 8),
        .method = get16(entry + 10),
        .crc = get32(entry + 16),
        .stored_size = get32(entry + 20),
        .size = get32(entry + 24),
        .header = get32(entry + 42),
    };
    if (!read_extra(ret, name + name_length, extra_length))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "zip member %.*s: no zip64 sizes where they are needed",
                          (int)name_length, ret->name);
    *at = name + name_length + extra_length + comment_length;
    return 0;
}

static int compare_names(const char *a, size_t a_length, const char *b, size_t b_length) {
    int order = memcmp(a, b, a_length < b_length ? a_length : b_length);
    if (order != 0 || a_length == b_length)
        return order;
    return a_length < b_length ? -1 : 1;
}

static int compare_members(const void *left, const void *right) {
    const struct member *a = left, *b = right;
    return compare_names(a->name, a->name_length, b->name, b->name_length);
}

/* --- what others see ---------------------------------------------------------------------------------------------- */

static void zip_cleanup(struct zip **zip) { zip_free(*zip); }

int zip_parse(const void *bytes, size_t size, struct zip **ret, struct oscar_cause *cause) {
    struct directory directory;
    int r = find_directory(bytes, size, &directory, cause);
    if (r < 0)
        return r;
    _cleanup_(zip_cleanup) struct zip *zip = calloc(1, sizeof(*zip));
    if (zip != NULL)
        zip->member = calloc(directory.entries + 1, sizeof(*zip->member));
    if (zip == NULL || zip->member == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a zip directory");
    zip->bytes = bytes;
    zip->size = size;
    const uint8_t *at = zip->bytes + directory.offset, *end = at + directory.size;
    for (; zip->members < directory.entries; zip->members++)
        if ((r = read_entry(&at, end, &zip->member[zip->members], cause)) < 0)
            return r;
    qsort(zip->member, zip->members, sizeof(*zip->member), compare_members);
    for (size_t i = 1; i < zip->members; i++)
        if (compare_members(&zip->member[i - 1], &zip->member[i]) == 0)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "zip member %.*s occurs twice", (int)zip->member[i].name_length,
                              zip->member[i].name);
    *ret = TAKE_PTR(zip);
    return 0;
}

void zip_free(struct zip *zip) {
    if (zip == NULL)
        return;
    free(zip->member);
    free(zip);
}

const char *zip_name(const struct zip *zip, size_t index, size_t *ret_length) {
    if (index >= zip->members)
        return NULL;
    *ret_length = zip->member[index].name_length;
    return zip->member[index].name;
}

/* CRC-32 (reflected polynomial 0xedb88320), half a byte a step. */
static uint32_t crc32_of(const uint8_t *bytes, size_t size) {
    static const uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        crc = crc >> 4 ^ table[crc & 15U];
        crc = crc >> 4 ^ table[crc & 15U];
    }
    return ~crc;
}

/* Sizes are those of the directory: a local header may leave them to what follows the data. */
static int locate(const struct zip *zip, const struct member *member, struct zip_data *ret) {
    if (member->header > zip->size || zip->size - member->header < LOCAL_BYTES)
        return -1;
    const uint8_t *header = zip->bytes + member->header;
    size_t left = zip->size - (size_t)member->header - LOCAL_BYTES;
    size_t skipped = (size_t)get16(header + 26) + get16(header + 28);
    if (get32(header) != LOCAL_SIGNATURE || skipped > left || member->size > left - skipped)
        return -1;
    *ret = (struct zip_data){header + LOCAL_BYTES + skipped, (size_t)member->size};
    return 0;
}

int zip_read(struct zip *zip, const char *name, struct zip_data *ret, struct oscar_cause *cause) {
    struct member key = {.name = name, .name_length = strlen(name)};
    struct member *member = bsearch(&key, zip->member, zip->members, sizeof(*zip->member), compare_members);
    struct zip_data data;
    if (member == NULL)
        return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "zip member %.100s is missing", name);
    if (member->method != 0 || (member->flags & ENCRYPTED) != 0)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "zip member %.100s is compressed or encrypted: expected stored",
                          name);
    if (member->stored_size != member->size || locate(zip, member, &data) < 0)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "zip member %.100s: %" PRIu64 " bytes after a header at byte %" PRIu64
                          " do not fit in a file of %zu bytes",
                          name, member->size, member->header, zip->size);
    if (!member->checked && crc32_of(data.bytes, data.size) != member->crc)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "zip member %.100s: its CRC-32 does not fit its bytes", name);
    member->checked = true;
    *ret = data;
    return 0;
}
