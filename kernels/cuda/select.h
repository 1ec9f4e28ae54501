/* SPDX-License-Identifier: Apache-2.0 */
/* Which GPU: found by UUID, and checked for what the backend needs. */
#ifndef OSCAR_KERNELS_CUDA_SELECT_H
#define OSCAR_KERNELS_CUDA_SELECT_H

#include "kernels/cuda/driver.h"

#define CUDA_ID_BYTES 48U

/* "GPU-" and the UUID, as nvidia-smi -L prints it. */
int cuda_device_name(const struct cuda_driver *driver, CUdevice device, char ret_id[CUDA_ID_BYTES],
                     struct oscar_cause *cause);

/* The device of that UUID (in either case), or for NULL or "" the first one that can be used. OSCAR_ERR_NOT_FOUND: not visible;
 * OSCAR_ERR_UNSUPPORTED: it lacks something; OSCAR_ERR_DEVICE. */
int cuda_device_select(const struct cuda_driver *driver, const char *id, CUdevice *ret, struct oscar_cause *cause);

#endif
