/* SPDX-License-Identifier: Apache-2.0 */
/* A small calibration file on disk, with everything a file can have: matrices, a turning centre, feedback. */
#ifndef OSCAR_TESTS_SUPPORT_CALIBRATION_FILE_H
#define OSCAR_TESTS_SUPPORT_CALIBRATION_FILE_H

#include "proto/digest.h"

/* What it is made for: 2 layers, 2 KV heads of 64 dims. */
extern const struct oscar_geometry calibration_file_geometry;

/* Writes it; `variant` makes files of different content. Returns its digest. */
struct oscar_digest calibration_file_write(const char *path, unsigned variant);
/* The same with a rotation that is none. */
void calibration_file_write_bad(const char *path);

#endif
