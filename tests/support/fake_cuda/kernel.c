/* SPDX-License-Identifier: Apache-2.0 */
/* Images of the fake driver and the kernels in them: those of kernels/cuda where their emulation is linked in, else only the two of
 * tests/gpu/probe.cu. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/gpu/probe_params.h"
#include "tests/support/cuda_emulation/emulation.h"
#include "tests/support/fake_cuda/inside.h"

#define NAME_BYTES 64           /* before an image lies its name: cmake/cuda.cmake */
#define FUNCTIONS 16            /* of an image, at most */
#define SHARED_BYTES (48 << 10) /* that a block may have without asking for more */

#pragma weak emulation_find
#pragma weak emulation_run

struct CUfunc_st {
    char name[64];
    const struct emulated_kernel *kernel; /* NULL: a probe, or one that does not run */
    int shared_bytes;                     /* at most */
};

struct CUmod_st {
    const char *name;
    unsigned count;
    struct CUfunc_st function[FUNCTIONS];
};

EXPORT CUresult cuModuleLoadData(CUmodule *ret, const void *image) {
    IN_CONTEXT();
    fake_unsafe_in_capture();
    CUmodule module = calloc(1, sizeof(*module));
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->name = (const char *)image - NAME_BYTES;
    *ret = module;
    fake_born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
    free(module);
    fake_gone();
    return CUDA_SUCCESS;
}

static int architecture(void) {
    const int *attribute = fake_cuda.device[0].attribute;
    return 10 * attribute[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] +
           attribute[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR];
}

EXPORT CUresult cuModuleGetFunction(CUfunction *ret, CUmodule module, const char *name) {
    IN_CONTEXT();
    if (module->count == FUNCTIONS || strlen(name) >= sizeof(module->function->name))
        return CUDA_ERROR_NOT_SUPPORTED;
    CUfunction function = &module->function[module->count];
    if (emulation_find) {
        function->kernel = emulation_find(module->name, architecture(), name);
        if (!function->kernel && strcmp(module->name, "probe") != 0)
            return CUDA_ERROR_NOT_FOUND;
    }
    strcpy(function->name, name);
    function->shared_bytes = SHARED_BYTES;
    module->count++;
    *ret = function;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    IN_CONTEXT();
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
        value > fake_cuda.device[0].attribute[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN])
        return CUDA_ERROR_INVALID_VALUE;
    function->shared_bytes = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    (void)attribute;
    (void)function;
    IN_CONTEXT();
    *value = 1024;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                            size_t shared_bytes) {
    (void)function;
    (void)threads;
    (void)shared_bytes;
    IN_CONTEXT();
    *blocks = 2;
    return CUDA_SUCCESS;
}

static void run_hold(const struct command *command) {
    struct probe_gate *gate = command->to;
    __atomic_store_n(&gate->arrived, 1, __ATOMIC_RELEASE);
    for (uint64_t waited = 0; waited < PROBE_LONGEST_NS && !__atomic_load_n(&gate->open, __ATOMIC_ACQUIRE);
         waited += 100000)
        usleep(100);
}

static CUresult launch_probe(CUfunction function, CUstream stream, void **parameters) {
    void *address;
    memcpy(&address, parameters[0], sizeof(address));
    if (strcmp(function->name, "probe_hold_kernel") == 0)
        return fake_enqueue(stream, (struct command){.run = run_hold, .to = address});
    if (strcmp(function->name, "probe_write_kernel") != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    return fake_enqueue(
        stream, (struct command){.run = fake_run_write, .to = address, .value = *(const uint64_t *)parameters[1]});
}

/* A launch, and its parameters behind it. */
struct launch {
    struct emulated_launch launch;
    unsigned char params[];
};

static void run_kernel(const struct command *command) { emulation_run(&((struct launch *)command->to)->launch); }

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z,
                               unsigned int shared_bytes, CUstream stream, void **parameters, void **extra) {
    (void)extra;
    IN_CONTEXT();
    if (!function->kernel)
        return grid_x * grid_y * grid_z * block_x * block_y * block_z == 1 && shared_bytes == 0
                   ? launch_probe(function, stream, parameters)
                   : CUDA_ERROR_NOT_SUPPORTED;
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || block_x == 0 || grid_y > 65535 || grid_z > 65535 ||
        block_x * block_y * block_z > 1024 || shared_bytes > (unsigned)function->shared_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    struct launch *launch = malloc(sizeof(*launch) + function->kernel->params_bytes);
    if (!launch)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(launch->params, parameters[0], function->kernel->params_bytes);
    launch->launch = (struct emulated_launch){.kernel = function->kernel,
                                              .grid = {grid_x, grid_y, grid_z},
                                              .block = {block_x, block_y, block_z},
                                              .shared_bytes = shared_bytes,
                                              .is_known = fake_is_known,
                                              .params = launch->params};
    CUresult result = fake_enqueue(stream, (struct command){.run = run_kernel, .to = launch, .owns = true});
    if (result != CUDA_SUCCESS)
        free(launch);
    return result;
}
