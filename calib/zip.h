/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A reader of zip archives in memory, as far as torch.save() needs one: members that are stored, not compressed, zip64
 * included. Every offset and size is bounds-checked; nothing is copied: a member's data is a view into the bytes.
 */
#ifndef OSCAR_CALIB_ZIP_H
#define OSCAR_CALIB_ZIP_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"

struct zip;

struct zip_data {
    const uint8_t *bytes;
    size_t size;
};

/* `bytes` must outlive the object. OSCAR_ERR_CORRUPT with the reason, OSCAR_ERR_NO_MEMORY. */
int zip_parse(const void *bytes, size_t size, struct zip **ret, struct oscar_cause *cause);
void zip_free(struct zip *zip); /* NULL is fine */

/* Names in the order of the alphabet, not terminated; NULL past the end. */
const char *zip_name(const struct zip *zip, size_t index, size_t *ret_length);

/* A member's data, with its CRC checked. OSCAR_ERR_NOT_FOUND, OSCAR_ERR_CORRUPT (its place, its CRC), OSCAR_ERR_UNSUPPORTED
 * (compressed, encrypted). */
int zip_read(struct zip *zip, const char *name, struct zip_data *ret, struct oscar_cause *cause);

#endif
