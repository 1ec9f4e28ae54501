/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/bench/gpu_bench.h"

#define WAIT_NS (UINT64_C(60) * 1000 * 1000 * 1000)

void gpu_must(int result, const char *what) {
    if (result >= 0)
        return;
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, oscar_error_text(result));
    exit(1);
}

void gpu_must_driver(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: %s: CUDA error %d\n", program_invocation_short_name, what, (int)result);
    exit(1);
}

void gpu_open(struct gpu_bench *bench) {
    struct oscar_cause cause = {""};
    int r = oscar_device_find("cuda", &bench->ops, &cause);
    if (r == 0)
        r = bench->ops->device_open(NULL, &bench->device, &cause);
    if (r == 0)
        r = cuda_enter(bench->device, &cause);
    if (r < 0) {
        fprintf(stderr, "%s: %s\n", program_invocation_short_name, cause.text);
        exit(1);
    }
    gpu_must_driver(bench->device->driver->cuStreamCreateWithPriority(&bench->native, CU_STREAM_NON_BLOCKING, 0),
                    "stream");
    struct oscar_stream_options options = {.native = bench->native};
    gpu_must(bench->ops->stream_open(bench->device, &options, &bench->stream, &cause), "stream");
}

void gpu_close(struct gpu_bench *bench) {
    bench->ops->stream_close(bench->stream);
    gpu_must_driver(bench->device->driver->cuStreamDestroy(bench->native), "stream");
    cuda_leave(bench->device);
    bench->ops->device_close(bench->device);
}

void gpu_wait(struct gpu_bench *bench) {
    gpu_must(bench->ops->stream_wait(bench->stream, WAIT_NS), "work on the device");
}

void *gpu_alloc(struct gpu_bench *bench, uint64_t bytes) {
    CUdeviceptr address = 0;
    if (bench->device->driver->cuMemAlloc(&address, bytes) != CUDA_SUCCESS) {
        fprintf(stderr, "%s: no %.1f GB of device memory\n", program_invocation_short_name, (double)bytes * 1e-9);
        exit(1);
    }
    return (void *)address; /* NOLINT(performance-no-int-to-ptr): addresses are the same on both sides */
}

void *gpu_upload(struct gpu_bench *bench, const void *bytes, uint64_t count) {
    void *memory = gpu_alloc(bench, count);
    gpu_must_driver(bench->device->driver->cuMemcpyHtoD((CUdeviceptr)memory, bytes, count), "copy to the device");
    return memory;
}

void gpu_read(struct gpu_bench *bench, void *ret_bytes, const void *memory, uint64_t count) {
    gpu_wait(bench);
    gpu_must_driver(bench->device->driver->cuMemcpyDtoH(ret_bytes, (CUdeviceptr)memory, count), "copy from the device");
}

void gpu_free(struct gpu_bench *bench, void *memory) {
    gpu_wait(bench);
    gpu_must_driver(bench->device->driver->cuMemFree((CUdeviceptr)memory), "free");
}
