/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host/level.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/host/level_code.h"

extern const struct host_level_code host_code_portable;

static const char *const level_names[HOST_LEVELS] = {"portable", "avx2", "avx512"};

const char *host_level_name(enum host_level level) {
    return (unsigned)level < HOST_LEVELS ? level_names[level] : "unknown";
}

#if defined(HOST_X86_LEVELS)

#include <cpuid.h>

extern const struct host_level_code host_code_avx2;
extern const struct host_level_code host_code_avx512;

static const struct host_level_code *const level_code[HOST_LEVELS] = {&host_code_portable, &host_code_avx2,
                                                                      &host_code_avx512};

/* clang 14 does not know this name in __builtin_cpu_supports(). */
static bool cpu_has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

/* The compiler's run time also asks the operating system (XGETBV) whether it saves the wide registers. */
bool host_level_supported(enum host_level level) {
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
    switch (level) {
    case HOST_PORTABLE:
        return true;
    case HOST_AVX2:
        return avx2;
    case HOST_AVX512:
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    default:
        return false;
    }
}

bool host_level_bf16(void) { return host_level_supported(HOST_AVX512) && __builtin_cpu_supports("avx512bf16"); }

#else

static const struct host_level_code *const level_code[HOST_LEVELS] = {&host_code_portable};

bool host_level_supported(enum host_level level) { return level == HOST_PORTABLE; }

bool host_level_bf16(void) { return false; }

#endif

const struct host_level_code *host_level_code(enum host_level level) { return level_code[level]; }

enum host_level host_level_best(void) {
    for (int level = HOST_LEVELS - 1; level > HOST_PORTABLE; level--)
        if (host_level_supported((enum host_level)level))
            return (enum host_level)level;
    return HOST_PORTABLE;
}

int host_level_current(enum host_level *ret, struct oscar_cause *cause) {
    const char *wanted = getenv("OSCAR_HOST_LEVEL");
    if (!wanted || !*wanted) {
        *ret = host_level_best();
        return 0;
    }
    for (int level = 0; level < HOST_LEVELS; level++) {
        if (strcmp(wanted, level_names[level]) != 0)
            continue;
        if (!host_level_supported((enum host_level)level))
            return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                              "OSCAR_HOST_LEVEL=%s, which this CPU does not run (best: %s)", wanted,
                              host_level_name(host_level_best()));
        *ret = (enum host_level)level;
        return 0;
    }
    return oscar_fail(cause, OSCAR_ERR_CONFIG, "OSCAR_HOST_LEVEL=%.32s is not one of portable, avx2, avx512", wanted);
}
