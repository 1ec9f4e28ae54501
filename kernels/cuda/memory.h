/* SPDX-License-Identifier: Apache-2.0 */
/* How device memory goes to other processes: between memory.c, which has chunks and ranges, and share_ipc.c. */
#ifndef OSCAR_KERNELS_CUDA_MEMORY_H
#define OSCAR_KERNELS_CUDA_MEMORY_H

#include "kernels/cuda/backend.h"

/* Sets the device's form of sharing, its granularity and whether ranges are reserved, by trying: memory is made and exported.
 * `ret_why` says why OSCAR_SHARE_AUTO took the second form, and is left alone else. Inside cuda_enter; the service stream is
 * open. OSCAR_ERR_UNSUPPORTED when the wanted form does not work here. */
int cuda_share_choose(struct oscar_device *device, enum oscar_share wanted, struct oscar_cause *ret_why,
                      struct oscar_cause *cause);

/* --- share_ipc.c ------------------------------------------------------------------------------------------------------------ */

/* A classic IPC handle has no descriptor: what crosses the socket in its place is a small sealed memfd that carries it. */

#define CUDA_IPC_GRANULARITY ((size_t)2 << 20) /* an allocation of this size is not a part of a larger one */

/* Memory that can be exported so, and a descriptor with its handle. Inside cuda_enter. */
int cuda_ipc_create(struct oscar_device *device, uint64_t bytes, CUdeviceptr *ret, int *ret_fd,
                    struct oscar_cause *cause);

/* What such a descriptor carries. */
struct cuda_ipc_handle {
    CUipcMemHandle handle;
    uint64_t bytes;
    char device[48]; /* its UUID */
};
/* False where `fd` is no such descriptor. */
bool cuda_ipc_read(int fd, struct cuda_ipc_handle *ret);

/* Maps it, at an address of the driver's choice: unmapped by cuIpcCloseMemHandle. Inside cuda_enter. */
int cuda_ipc_map(struct oscar_device *device, const struct cuda_ipc_handle *handle, uint64_t bytes, CUdeviceptr *ret,
                 struct oscar_cause *cause);

#endif
