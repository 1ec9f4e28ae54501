/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"
#define LIBRARY_VARIABLE "OSCAR_CUDA_DRIVER"

/* Images of one major version of the toolkit need a driver of that version or a later one. */
#define NEEDED_VERSION (CUDA_VERSION / 1000 * 1000)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cuda_driver table; /* guarded by the lock until it is loaded; constant from then on */
static bool loaded;

/* The symbol that cuda.h means by a name: the macro argument is expanded to the versioned one. */
#define SYMBOL_(name) #name
#define SYMBOL(name) SYMBOL_(name)

static const struct symbol {
    const char *name;
    size_t offset; /* in the table */
} symbols[] = {
#define SYMBOL_ENTRY(name) {SYMBOL(name), offsetof(struct cuda_driver, name)},
    CUDA_DRIVER_FUNCTIONS(SYMBOL_ENTRY)
#undef SYMBOL_ENTRY
};

/* What a failed cuInit means to the operator. */
static const struct remedy {
    CUresult result;
    const char *text;
} remedies[] = {
    {CUDA_ERROR_NO_DEVICE,
     "no GPU is visible: check nvidia-smi, the container's device access and CUDA_VISIBLE_DEVICES"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
     "the driver's library and its kernel module are of different versions: reboot, or reload the module"},
    {CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
     "a forward-compatibility library is in the library path, and this GPU does not allow it: take it away"},
    {CUDA_ERROR_SYSTEM_NOT_READY, "the system is not ready: start nvidia-fabricmanager"},
    {CUDA_ERROR_STUB_LIBRARY, "the toolkit's stub was found instead of the driver: take stubs out of the library path"},
    {CUDA_ERROR_MPS_CONNECTION_FAILED,
     "the MPS server does not answer: start nvidia-cuda-mps-control, or unset CUDA_MPS_PIPE_DIRECTORY"},
    {CUDA_ERROR_UNKNOWN, "the kernel module does not answer: check /dev/nvidia* and the system log"},
};

static const char *name_of(const struct cuda_driver *driver, CUresult result) {
    const char *name;
    return driver->cuGetErrorName(result, &name) == CUDA_SUCCESS && name ? name : "unknown CUDA error";
}

static int init_failure(const struct cuda_driver *driver, CUresult result, struct oscar_cause *cause) {
    for (size_t i = 0; i < sizeof(remedies) / sizeof(*remedies); i++)
        if (remedies[i].result == result)
            return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "cuInit: %s: %s", name_of(driver, result),
                              remedies[i].text);
    const char *text = NULL;
    (void)driver->cuGetErrorString(result, &text);
    return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "cuInit: %s: %s", name_of(driver, result),
                      text ? text : "no text for it");
}

/* Fills the table from an opened library and starts the driver. */
static int table_fill(void *library, struct cuda_driver *driver, struct oscar_cause *cause) {
    for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
        void *function = dlsym(library, symbols[i].name);
        if (!function)
            return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                              "the NVIDIA driver is too old: it has no %s; this build needs one for CUDA %d.%d",
                              symbols[i].name, NEEDED_VERSION / 1000, NEEDED_VERSION % 1000 / 10);
        memcpy((char *)driver + symbols[i].offset, &function, sizeof(function));
    }
    int version = 0;
    CUresult result = driver->cuDriverGetVersion(&version);
    if (result != CUDA_SUCCESS)
        return cuda_result(driver, result, "cuDriverGetVersion", cause);
    if (version < NEEDED_VERSION)
        return oscar_fail(
            cause, OSCAR_ERR_UNSUPPORTED,
            "the NVIDIA driver is too old: it is for CUDA %d.%d, this build needs one for %d.%d: update it",
            version / 1000, version % 1000 / 10, NEEDED_VERSION / 1000, NEEDED_VERSION % 1000 / 10);
    result = driver->cuInit(0);
    return result == CUDA_SUCCESS ? 0 : init_failure(driver, result, cause);
}

/* A failure is not remembered: the driver may come later. */
static int load(struct oscar_cause *cause) {
    if (loaded)
        return 0;
    const char *given = getenv(LIBRARY_VARIABLE);
    const char *path = given && *given ? given : LIBRARY;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "no NVIDIA driver: %s: install it, or use the host backend (library named by %s)", dlerror(),
                          LIBRARY_VARIABLE);
    struct cuda_driver driver;
    int r = table_fill(library, &driver, cause);
    if (r < 0) {
        dlclose(library);
        return r;
    }
    table = driver;
    loaded = true;
    return 0;
}

int cuda_driver_load(const struct cuda_driver **ret, struct oscar_cause *cause) {
    pthread_mutex_lock(&lock);
    int r = load(cause);
    pthread_mutex_unlock(&lock);
    if (r == 0)
        *ret = &table;
    return r;
}

static int error_of(CUresult result) {
    switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
        return OSCAR_ERR_NO_SPACE;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_IMAGE: /* a build without kernels */
        return OSCAR_ERR_UNSUPPORTED;
    case CUDA_ERROR_INVALID_VALUE:
        return OSCAR_ERR_INVALID;
    default:
        return OSCAR_ERR_DEVICE;
    }
}

int cuda_result(const struct cuda_driver *driver, CUresult result, const char *what, struct oscar_cause *cause) {
    if (result == CUDA_SUCCESS)
        return 0;
    int error = error_of(result);
    const char *text = NULL;
    (void)driver->cuGetErrorString(result, &text);
    return oscar_fail(cause, error, "%s: %s: %s", what, name_of(driver, result), text ? text : "no text for it");
}
