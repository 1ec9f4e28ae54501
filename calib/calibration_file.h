/* SPDX-License-Identifier: Apache-2.0 */
/* A calibration file on the disk, read for the shape that it says itself to be made for. */
#ifndef OSCAR_CALIB_CALIBRATION_FILE_H
#define OSCAR_CALIB_CALIBRATION_FILE_H

#include <stdbool.h>

#include "proto/calibration.h"

struct calibration_file {
    void *bytes;
    size_t size;
    struct oscar_calibration *calibration;
};

/* `verify`: every number is checked, too. Errors name the file. */
int calibration_file_open(const char *path, bool verify, struct calibration_file *ret, struct oscar_cause *cause);
void calibration_file_close(struct calibration_file *file);

#endif
