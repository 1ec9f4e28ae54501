/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a fit leaves on the disk: a part for each layer that is done, in OUTPUT.parts beside the output, so that an interrupted
 * fit can be taken up; and the calibration file (format 1 of proto/CALIBRATION.md), made of the parts.
 */
#ifndef OSCAR_CALIB_FIT_FILE_H
#define OSCAR_CALIB_FIT_FILE_H

#include <stdbool.h>

#include "calib/fit_layer.h"
#include "proto/digest.h"
#include "proto/safetensors.h"

struct fit_part {
    struct oscar_safetensors *file;
    struct layer_fit_kind error[FIT_KINDS]; /* its errors only */
};

/* Writes one layer's part. `digest` says what it was made of. */
int fit_part_save(const char *folder, uint32_t layer, const struct oscar_digest *digest, const struct layer_fit *fit,
                  const struct fit_options *options, struct oscar_cause *cause);
/* True when the part is there and made of the same. */
bool fit_part_good(const char *folder, uint32_t layer, const struct oscar_digest *digest);

/* What the file says about itself besides the numbers. */
struct fit_summary {
    const struct layer_fitter *fitter;
    const char *model;
    uint32_t layers;
    const uint32_t *source_layers; /* [layers] */
    bool renumbered;               /* source_layers are not 0, 1, .. */
    const char *sources;           /* "name blake2b-256 digest" of each file, with line breaks between */
    uint64_t tokens, positions;
};

/* Chooses the kinds, K's and V's, and writes the file. Its choice is said on standard error. */
int fit_file_save(const char *folder, const char *path, const struct fit_summary *summary, struct oscar_cause *cause);
/* Removes the parts and their folder. */
void fit_parts_remove(const char *folder);

#endif
