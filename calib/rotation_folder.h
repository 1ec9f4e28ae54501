/* SPDX-License-Identifier: Apache-2.0 */
/* A folder of the published rotation zoo: a PyTorch file of K's rotations and one of V's, beside whatever else lies there. */
#ifndef OSCAR_CALIB_ROTATION_FOLDER_H
#define OSCAR_CALIB_ROTATION_FOLDER_H

#include <stdbool.h>

#include "proto/cause.h"

bool rotation_folder_is(const char *path);

/* The one file FOLDER/<side>_rotation*.pt; `side` is 'k' or 'v'. *ret_path is malloced. OSCAR_ERR_NOT_FOUND where there is none,
 * OSCAR_ERR_INVALID where there are several. */
int rotation_folder_find(const char *folder, char side, char **ret_path, struct oscar_cause *cause);

#endif
