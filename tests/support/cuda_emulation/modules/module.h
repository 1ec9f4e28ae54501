/* SPDX-License-Identifier: Apache-2.0 */
/* Behind a kernel source that a module includes: its name, its architecture, and the kernels in it. */
#ifndef OSCAR_TESTS_CUDA_EMULATION_MODULE_H
#define OSCAR_TESTS_CUDA_EMULATION_MODULE_H

#include "tests/support/cuda_emulation/emulation.h"

template <class Params, void (*kernel)(Params)> static void emulated_call(const void *params) {
    kernel(*static_cast<const Params *>(params));
}
template <class Params> static Params emulated_params(void (*)(Params));

#define EMULATED_KERNEL(name, function)                                                                                \
    { name, emulated_call<decltype(emulated_params(function)), function>, sizeof(decltype(emulated_params(function))) }

#define EMULATED_MODULE(name, architecture, ...)                                                                       \
    static const struct emulated_kernel kernels[] = {__VA_ARGS__};                                                     \
    static struct emulated_module module = {name, architecture, kernels, sizeof(kernels) / sizeof(*kernels), nullptr}; \
    __attribute__((constructor)) static void add_module() { emulation_add(&module); }

#endif
