/* SPDX-License-Identifier: Apache-2.0 */
/* How device memory goes to other processes: between memory.c (chunks), range.c (ranges), share.c (the choice of a form) and
 * share_ipc.c (the second form). All of it inside cuda_enter, unless it says else. */
#ifndef OSCAR_KERNELS_CUDA_MEMORY_H
#define OSCAR_KERNELS_CUDA_MEMORY_H

#include "kernels/cuda/backend.h"

/* OSCAR_ERR_INVALID unless the bytes are a multiple of the granularity. Without the context. */
int cuda_check_size(const struct oscar_device *device, uint64_t bytes, const char *what, struct oscar_cause *cause);

/* --- memory.c --------------------------------------------------------------------------------------------------------------- */

CUmemAllocationProp cuda_vmm_properties(const struct oscar_device *device);
/* Maps all of `memory` at a reserved address, where nothing can be read or written yet. OSCAR_ERR_INVALID where it does not have
 * as many bytes. */
int cuda_vmm_map(struct oscar_device *device, CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle memory,
                 struct oscar_cause *cause);
/* Makes what is mapped there accessible, one memory or several side by side, by one call of the driver. */
int cuda_vmm_access(struct oscar_device *device, CUdeviceptr address, uint64_t bytes, bool writable,
                    struct oscar_cause *cause);
/* Does not take `fd`. OSCAR_ERR_INVALID where that is none of device memory. */
int cuda_vmm_import(struct oscar_device *device, int fd, CUmemGenericAllocationHandle *ret, struct oscar_cause *cause);

int cuda_chunk_make(struct oscar_device *device, enum oscar_share share, uint64_t bytes, struct oscar_chunk **ret,
                    struct oscar_cause *cause);
/* Takes apart as much as there is. In the context, or without it where the device is lost. */
void cuda_chunk_discard(struct oscar_chunk *chunk);

/* --- share.c ---------------------------------------------------------------------------------------------------------------- */

/* Sets the device's form of sharing, its granularity and whether ranges are reserved, by trying: memory of a form that may
 * be taken is made and exported. `ret_why` says why OSCAR_SHARE_AUTO took the second form, and is left alone else. The service stream
 * is open. OSCAR_ERR_UNSUPPORTED when the wanted form does not work here. */
int cuda_share_choose(struct oscar_device *device, enum oscar_share wanted, struct oscar_cause *ret_why,
                      struct oscar_cause *cause);

/* --- share_ipc.c ------------------------------------------------------------------------------------------------------------ */

/* A classic IPC handle has no descriptor: what crosses the socket in its place is a small sealed memfd that carries it. */

#define CUDA_IPC_GRANULARITY ((size_t)2 << 20) /* an allocation of this size is not a part of a larger one */

/* Memory that can be exported so, and a descriptor with its handle. */
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

/* Maps it, at an address of the driver's choice: unmapped by cuIpcCloseMemHandle. */
int cuda_ipc_map(struct oscar_device *device, const struct cuda_ipc_handle *handle, uint64_t bytes, CUdeviceptr *ret,
                 struct oscar_cause *cause);

#endif
