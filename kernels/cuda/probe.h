/* SPDX-License-Identifier: Apache-2.0 */
/* For who chooses a backend, without a CUDA header. */
#ifndef OSCAR_KERNELS_CUDA_PROBE_H
#define OSCAR_KERNELS_CUDA_PROBE_H

#include "proto/cause.h"

/* Whether a GPU can be opened here, without making a context on it: 0, or why not (as device_open says). Costs a failed
 * dlopen where there is no driver. */
int cuda_probe(struct oscar_cause *cause);

#endif
