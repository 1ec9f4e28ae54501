/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/fake_cuda/inside.h"

/* Set up by the constructor, so that a program that only names the library finds a whole machine. */
struct fake_cuda fake_cuda;

EXPORT void fake_cuda_new_machine(void);

static const struct {
    CUdevice_attribute attribute;
    int value;
} whole[] = {
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 1 << 20},
};

int fake_given(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

__attribute__((constructor)) void fake_cuda_new_machine(void) {
    int capability = fake_given("FAKE_CUDA_CAPABILITY", 90), processors = fake_given("FAKE_CUDA_PROCESSORS", 4);
    int live = atomic_load(&fake_cuda.live); /* the library's own count is no part of the machine */
    memset(&fake_cuda, 0, sizeof(fake_cuda));
    atomic_store(&fake_cuda.live, live);
    fake_cuda.version = CUDA_VERSION;
    fake_cuda.devices = 2;
    for (int i = 0; i < FAKE_DEVICES; i++) {
        struct fake_device *device = &fake_cuda.device[i];
        fake_cuda.visible[i] = i;
        for (int k = 0; k < 16; k++)
            device->uuid[k] = (unsigned char)(0xA0 + 16 * i + k);
        (void)snprintf(device->name, sizeof(device->name), "Fake GPU %d", i);
        for (size_t k = 0; k < sizeof(whole) / sizeof(*whole); k++)
            device->attribute[whole[k].attribute] = whole[k].value;
        device->attribute[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = capability / 10;
        device->attribute[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = capability % 10;
        device->attribute[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT] = processors;
    }
}

/* --- every call ------------------------------------------------------------------------------------------------------------- */

static _Thread_local unsigned depth;
static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

atomic_uint fake_in_flight;

static CUresult fail(const char *name) {
    while (fake_cuda.failure == CUDA_ERROR_ILLEGAL_ADDRESS && atomic_load(&fake_in_flight) > 0)
        usleep(100); /* nothing runs in a context that is lost */
    fake_cuda.failed = name;
    return fake_cuda.failure;
}

static bool is_to_fail(const char *name) { return fake_cuda.failing && strcmp(fake_cuda.failing, name) == 0; }

CUresult fake_may_fail(const char *name) {
    unsigned call = atomic_fetch_add_explicit(&fake_cuda.calls, 1, memory_order_relaxed) + 1;
    if (fake_cuda.counting && strcmp(fake_cuda.counting, name) == 0)
        atomic_fetch_add(&fake_cuda.counted, 1);
    return is_to_fail(name) || call == fake_cuda.fail_at ? fail(name) : CUDA_SUCCESS;
}

CUresult fake_in_context_asking(const char *name) {
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (fake_cuda.sticky != CUDA_SUCCESS)
        return fake_cuda.sticky;
    return is_to_fail(name) ? fail(name) : CUDA_SUCCESS;
}

CUresult fake_in_context(const char *name) {
    CUresult result = fake_in_context_asking(name);
    return result == CUDA_SUCCESS ? fake_may_fail(name) : result;
}

void fake_unsafe_in_capture(void) {
    if (capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        atomic_fetch_add(&fake_cuda.unrelaxed, 1);
}

void fake_born(void) { atomic_fetch_add(&fake_cuda.live, 1); }
void fake_gone(void) { atomic_fetch_sub(&fake_cuda.live, 1); }

/* --- driver and devices ----------------------------------------------------------------------------------------------------- */

EXPORT CUresult cuInit(unsigned int flags) {
    MAY_FAIL();
    return flags == 0 ? fake_cuda.init : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    MAY_FAIL();
    *version = fake_cuda.version;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
    static const struct {
        CUresult result;
        const char *name;
    } names[] = {
        {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
    };
    *text = "CUDA_ERROR_OF_SOME_KIND";
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (names[i].result == error)
            *text = names[i].name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    (void)error;
    *text = "a text of the fake driver";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    MAY_FAIL();
    *count = fake_cuda.devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    MAY_FAIL();
    if (ordinal < 0 || ordinal >= fake_cuda.devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = fake_cuda.visible[ordinal];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    MAY_FAIL();
    (void)snprintf(name, (size_t)length, "%s", fake_cuda.device[device].name);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    MAY_FAIL();
    memcpy(uuid->bytes, fake_cuda.device[device].uuid, sizeof(uuid->bytes));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    MAY_FAIL();
    if (attribute >= FAKE_ATTRIBUTES)
        return CUDA_ERROR_INVALID_VALUE;
    *value = fake_cuda.device[device].attribute[attribute];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    (void)device;
    MAY_FAIL();
    *bytes = (size_t)16 << 30;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    MAY_FAIL();
    *context = (CUcontext)&fake_cuda.device[device];
    fake_born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    (void)device;
    fake_gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
    (void)context;
    MAY_FAIL();
    depth++;
    atomic_fetch_add(&fake_cuda.entered, 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *context) {
    (void)context;
    depth--;
    atomic_fetch_sub(&fake_cuda.entered, 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    IN_CONTEXT();
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode old = capture_mode;
    capture_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}
