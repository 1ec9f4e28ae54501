/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVIDIA's driver with calls that do not return (libwedged_driver.so, given to the backend by OSCAR_CUDA_DRIVER): while the file that
 * $OSCAR_TEST_WEDGE names exists, launches of kernels stand still. All other functions are those of libcuda.so.1, which this
 * library needs, so that who looks them up here finds them there.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef CUresult launch_function(CUfunction f, unsigned gridDimX, unsigned gridDimY, unsigned gridDimZ,
                                 unsigned blockDimX, unsigned blockDimY, unsigned blockDimZ, unsigned sharedMemBytes,
                                 CUstream hStream, void **kernelParams, void **extra);

static void stand_still(void) {
    const char *path = getenv("OSCAR_TEST_WEDGE");
    const struct timespec pause = {.tv_nsec = 1000000};
    while (path != NULL && access(path, F_OK) == 0)
        (void)nanosleep(&pause, NULL);
}

/* The parameters have the names that cuda.h gives them. */
__attribute__((visibility("default"))) CUresult CUDAAPI cuLaunchKernel(
    CUfunction f, unsigned gridDimX, unsigned gridDimY, unsigned gridDimZ, unsigned blockDimX, unsigned blockDimY,
    unsigned blockDimZ, unsigned sharedMemBytes, CUstream hStream, void **kernelParams, void **extra) {
    launch_function *real;
    *(void **)&real = dlsym(RTLD_NEXT, "cuLaunchKernel");
    stand_still();
    return real != NULL ? real(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes,
                               hStream, kernelParams, extra)
                        : CUDA_ERROR_NOT_FOUND;
}
