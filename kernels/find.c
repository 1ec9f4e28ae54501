/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "oscar/device.h"

#ifdef OSCAR_CUDA
#include "kernels/cuda/probe.h"

#define BUILT_IN "host and cuda"
#else
#define BUILT_IN "host"

static int cuda_probe(struct oscar_cause *cause) {
    return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "backend \"cuda\" is not built in: build with CUDA's nvcc in PATH");
}

const struct oscar_device_ops *oscar_device_cuda(void) { return NULL; }
#endif

int oscar_device_find(const char *name, const struct oscar_device_ops **ret, struct oscar_cause *cause) {
    if (name && strcmp(name, "host") == 0) {
        *ret = oscar_device_host();
        return 0;
    }
    bool automatic = !name || !*name || strcmp(name, "auto") == 0;
    if (!automatic && strcmp(name, "cuda") != 0)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "there is no backend \"%.32s\": this build has %s", name,
                          BUILT_IN);
    int r = cuda_probe(cause);
    if (r < 0 && !automatic)
        return r;
    *ret = r == 0 ? oscar_device_cuda() : oscar_device_host();
    return 0;
}
