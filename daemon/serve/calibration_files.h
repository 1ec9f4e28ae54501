/* SPDX-License-Identifier: Apache-2.0 */
/* The calibration directory, and what has been read from it: used by one thread, which may block on the disk. */
#ifndef OSCAR_DAEMON_SERVE_CALIBRATION_FILES_H
#define OSCAR_DAEMON_SERVE_CALIBRATION_FILES_H

#include "daemon/serve/calibrations.h"

struct calibration_files;

int calibration_files_new(const char *directory, uint32_t max_pages, struct calibration_files **ret,
                          struct oscar_cause *cause);
void calibration_files_free(struct calibration_files *files); /* no calibration that came from it may live on */
/* Fills in calibration, file_fd, turns_fd and read. OSCAR_ERR_NOT_FOUND, OSCAR_ERR_IO, or as oscar_calibration_parse().
 * */
int calibration_files_load(struct calibration_files *files, const char *name, const struct oscar_geometry *geometry,
                           struct calibrations_result *ret, struct oscar_cause *cause);

#endif
