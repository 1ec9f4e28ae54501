/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/select.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "kernels/cuda/probe.h"

#define WSL_DEVICE "/dev/dxg"
#define MIG_PREFIX "MIG-"

/* Attributes that a device must have, and what to do where it has not. */
static const struct need {
    CUdevice_attribute attribute;
    int least;
    const char *text;
} needs[] = {
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8,
     "its compute capability is below 8.0: use a GPU of the Ampere generation or a later one, or the host backend"},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1, "it has no unified addresses: use a 64-bit Linux, or the host backend"},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1,
     "host memory cannot be registered, which fences need: update the driver, or use the host backend"},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1,
     "streams cannot write 64-bit values, which fences need: update the driver, or use the host backend"},
};

static int attribute(const struct cuda_driver *driver, CUdevice device, CUdevice_attribute wanted, int *ret,
                     struct oscar_cause *cause) {
    return cuda_result(driver, driver->cuDeviceGetAttribute(ret, wanted, device), "cuDeviceGetAttribute", cause);
}

int cuda_device_name(const struct cuda_driver *driver, CUdevice device, char ret_id[CUDA_ID_BYTES],
                     struct oscar_cause *cause) {
    CUuuid uuid;
    int r = cuda_result(driver, driver->cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid", cause);
    if (r < 0)
        return r;
    int length = snprintf(ret_id, CUDA_ID_BYTES, "GPU");
    for (int i = 0; i < 16; i++) {
        bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        length += snprintf(ret_id + length, CUDA_ID_BYTES - (size_t)length, "%s%02x", dash ? "-" : "",
                           (unsigned)(unsigned char)uuid.bytes[i]);
    }
    return 0;
}

static int check_compute_mode(const struct cuda_driver *driver, CUdevice device, const char *id,
                              struct oscar_cause *cause) {
    int mode, mps = 0;
    int r = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, &mode, cause);
    if (r == 0 && mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS)
        r = attribute(driver, device, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, &mps, cause);
    if (r < 0)
        return r;
    if (mode == CU_COMPUTEMODE_PROHIBITED)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "%s: its compute mode is prohibited: set it back with nvidia-smi -c DEFAULT", id);
    if (mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS && !mps)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "%s: its compute mode lets one process in, and daemon and workers are several: nvidia-smi -c "
                          "DEFAULT, or start MPS",
                          id);
    return 0;
}

static int check_device(const struct cuda_driver *driver, CUdevice device, struct oscar_cause *cause) {
    char id[CUDA_ID_BYTES], name[128] = "";
    int r = cuda_device_name(driver, device, id, cause);
    if (r == 0)
        r = cuda_result(driver, driver->cuDeviceGetName(name, sizeof(name), device), "cuDeviceGetName", cause);
    if (r < 0)
        return r;
    if (strstr(name, " MIG "))
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "%s is a MIG instance (%.64s), whose memory other processes cannot map: use a whole GPU "
                          "(nvidia-smi -mig 0)",
                          id, name);
    for (size_t i = 0; i < sizeof(needs) / sizeof(*needs); i++) {
        int value;
        r = attribute(driver, device, needs[i].attribute, &value, cause);
        if (r < 0)
            return r;
        if (value < needs[i].least)
            return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "%s (%.64s): %s", id, name, needs[i].text);
    }
    return check_compute_mode(driver, device, id, cause);
}

static int check_system(const char *id, struct oscar_cause *cause) {
    if (access(WSL_DEVICE, F_OK) == 0)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "this is WSL (%s), where processes cannot share GPU memory: use Linux, or the host backend",
                          WSL_DEVICE);
    if (id && strncasecmp(id, MIG_PREFIX, strlen(MIG_PREFIX)) == 0)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "%.64s is a MIG instance, whose memory other processes cannot map: use a whole GPU", id);
    return 0;
}

static int not_found(const struct cuda_driver *driver, const char *id, int count, struct oscar_cause *cause) {
    char visible[OSCAR_CAUSE_BYTES] = "";
    size_t length = 0;
    for (int i = 0; i < count && length < sizeof(visible) - CUDA_ID_BYTES - 1; i++) {
        CUdevice device;
        char name[CUDA_ID_BYTES];
        if (driver->cuDeviceGet(&device, i) == CUDA_SUCCESS && cuda_device_name(driver, device, name, NULL) == 0)
            length += (size_t)snprintf(visible + length, sizeof(visible) - length, " %s", name);
    }
    return oscar_fail(cause, OSCAR_ERR_NOT_FOUND,
                      "no GPU \"%.64s\" is visible here (CUDA_VISIBLE_DEVICES, container). There is:%s", id, visible);
}

int cuda_device_select(const struct cuda_driver *driver, const char *id, CUdevice *ret, struct oscar_cause *cause) {
    bool any = !id || !*id;
    int count = 0;
    int r = check_system(id, cause);
    if (r == 0)
        r = cuda_result(driver, driver->cuDeviceGetCount(&count), "cuDeviceGetCount", cause);
    if (r < 0)
        return r;
    if (count == 0)
        return oscar_fail(
            cause, OSCAR_ERR_UNSUPPORTED,
            "no GPU is visible: check nvidia-smi, the container's device access and CUDA_VISIBLE_DEVICES");
    struct oscar_cause first = {""}; /* of several unusable devices the first one's lack is told */
    int unusable = 0;
    for (int i = 0; i < count; i++) {
        CUdevice device;
        char name[CUDA_ID_BYTES];
        r = cuda_result(driver, driver->cuDeviceGet(&device, i), "cuDeviceGet", cause);
        if (r == 0)
            r = cuda_device_name(driver, device, name, cause);
        if (r < 0)
            return r;
        if (!any && strcasecmp(name, id) != 0)
            continue;
        struct oscar_cause lack = {""};
        r = check_device(driver, device, &lack);
        if (r == 0) {
            *ret = device;
            return 0;
        }
        if (unusable == 0) {
            unusable = r;
            first = lack;
        }
    }
    if (unusable == 0)
        return not_found(driver, id, count, cause);
    return oscar_fail(cause, unusable, "%s", first.text);
}

int cuda_probe(struct oscar_cause *cause) {
    const struct cuda_driver *driver;
    CUdevice device;
    int r = cuda_driver_load(&driver, cause);
    return r < 0 ? r : cuda_device_select(driver, NULL, &device, cause);
}
