/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/fake_cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct fake_cuda *fake_cuda_reset(void) {
    static void *library; /* for good, like the backend's own */
    if (!library)
        library = dlopen(FAKE_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    setenv("OSCAR_CUDA_DRIVER", FAKE_CUDA_LIBRARY, 1);
    void (*new_machine)(void) = (void (*)(void))dlsym(library, "fake_cuda_new_machine");
    new_machine();
    return dlsym(library, "fake_cuda");
}
