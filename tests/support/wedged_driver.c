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

typedef CUresult launch_function(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                 CUstream stream, void **parameters, void **extra);

static void stand_still(void) {
    const char *path = getenv("OSCAR_TEST_WEDGE");
    const struct timespec pause = {.tv_nsec = 1000000};
    while (path != NULL && access(path, F_OK) == 0)
        (void)nanosleep(&pause, NULL);
}

__attribute__((visibility("default"))) CUresult CUDAAPI cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters, void **extra) {
    launch_function *real;
    *(void **)&real = dlsym(RTLD_NEXT, "cuLaunchKernel");
    stand_still();
    return real != NULL ? real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                               parameters, extra)
                        : CUDA_ERROR_NOT_FOUND;
}
