/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVIDIA's driver, found at run time: libcuda.so.1, or what OSCAR_CUDA_DRIVER names. One table of its functions for the process,
 * never unloaded.
 */
#ifndef OSCAR_KERNELS_CUDA_DRIVER_H
#define OSCAR_KERNELS_CUDA_DRIVER_H

#include <cuda.h>

#include "proto/cause.h"

/* X(name): every driver function that the backend calls, by the name it has in cuda.h (which may map it to a versioned symbol). */
#define CUDA_DRIVER_FUNCTIONS(X)                                                                                       \
    X(cuInit)                                                                                                          \
    X(cuDriverGetVersion)                                                                                              \
    X(cuGetErrorName)                                                                                                  \
    X(cuGetErrorString)                                                                                                \
    X(cuDeviceGetCount)                                                                                                \
    X(cuDeviceGet)                                                                                                     \
    X(cuDeviceGetName)                                                                                                 \
    X(cuDeviceGetUuid)                                                                                                 \
    X(cuDeviceGetAttribute)                                                                                            \
    X(cuDeviceTotalMem)                                                                                                \
    X(cuDevicePrimaryCtxRetain)                                                                                        \
    X(cuDevicePrimaryCtxRelease)                                                                                       \
    X(cuCtxPushCurrent)                                                                                                \
    X(cuCtxPopCurrent)                                                                                                 \
    X(cuCtxGetStreamPriorityRange)                                                                                     \
    X(cuMemGetInfo)                                                                                                    \
    X(cuMemAlloc)                                                                                                      \
    X(cuMemFree)                                                                                                       \
    X(cuMemHostAlloc)                                                                                                  \
    X(cuMemFreeHost)                                                                                                   \
    X(cuMemHostRegister)                                                                                               \
    X(cuMemHostUnregister)                                                                                             \
    X(cuMemHostGetDevicePointer)                                                                                       \
    X(cuMemcpyAsync)                                                                                                   \
    X(cuMemcpyHtoD)                                                                                                    \
    X(cuMemcpyDtoH)                                                                                                    \
    X(cuMemsetD8Async)                                                                                                 \
    X(cuMemsetD8)                                                                                                      \
    X(cuMemGetAllocationGranularity)                                                                                   \
    X(cuMemCreate)                                                                                                     \
    X(cuMemRelease)                                                                                                    \
    X(cuMemAddressReserve)                                                                                             \
    X(cuMemAddressFree)                                                                                                \
    X(cuMemMap)                                                                                                        \
    X(cuMemUnmap)                                                                                                      \
    X(cuMemSetAccess)                                                                                                  \
    X(cuMemExportToShareableHandle)                                                                                    \
    X(cuMemImportFromShareableHandle)                                                                                  \
    X(cuIpcGetMemHandle)                                                                                               \
    X(cuIpcOpenMemHandle)                                                                                              \
    X(cuIpcCloseMemHandle)                                                                                             \
    X(cuModuleLoadData)                                                                                                \
    X(cuModuleUnload)                                                                                                  \
    X(cuModuleGetFunction)                                                                                             \
    X(cuFuncSetAttribute)                                                                                              \
    X(cuFuncGetAttribute)                                                                                              \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor)                                                                     \
    X(cuLaunchKernel)                                                                                                  \
    X(cuLaunchKernelEx)                                                                                                \
    X(cuLaunchHostFunc)                                                                                                \
    X(cuStreamCreateWithPriority)                                                                                      \
    X(cuStreamDestroy)                                                                                                 \
    X(cuStreamQuery)                                                                                                   \
    X(cuStreamSynchronize)                                                                                             \
    X(cuStreamIsCapturing)                                                                                             \
    X(cuThreadExchangeStreamCaptureMode)                                                                               \
    X(cuStreamWaitEvent)                                                                                               \
    X(cuStreamWriteValue64)                                                                                            \
    X(cuStreamWaitValue64)                                                                                             \
    X(cuEventCreate)                                                                                                   \
    X(cuEventDestroy)                                                                                                  \
    X(cuEventRecord)                                                                                                   \
    X(cuEventQuery)                                                                                                    \
    X(cuEventSynchronize)                                                                                              \
    X(cuEventElapsedTime)                                                                                              \
    X(cuStreamBeginCapture)                                                                                            \
    X(cuStreamEndCapture)                                                                                              \
    X(cuGraphInstantiate)                                                                                              \
    X(cuGraphLaunch)                                                                                                   \
    X(cuGraphExecDestroy)                                                                                              \
    X(cuGraphDestroy)

struct cuda_driver {
#define CUDA_DRIVER_MEMBER(name) __typeof__(name) *name;
    CUDA_DRIVER_FUNCTIONS(CUDA_DRIVER_MEMBER)
#undef CUDA_DRIVER_MEMBER
};

/* The table, loaded and initialised by the first call. OSCAR_ERR_UNSUPPORTED: no driver (install it, or use the host backend),
 * one that is too old, or no device that may be used. */
int cuda_driver_load(const struct cuda_driver **ret, struct oscar_cause *cause);

/* 0, or the driver's failure as an error of ours with a cause: "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY: out of memory".
 * Out of memory is OSCAR_ERR_NO_SPACE, a missing feature OSCAR_ERR_UNSUPPORTED, an invalid value (an address that is nobody's)
 * OSCAR_ERR_INVALID, all else OSCAR_ERR_DEVICE. */
int cuda_result(const struct cuda_driver *driver, CUresult result, const char *what, struct oscar_cause *cause);

#endif
