/* SPDX-License-Identifier: Apache-2.0 */
/* What nvcc supplies without being asked: words of the language, types, and functions of a thread. Included before every source. */
#ifndef OSCAR_TESTS_CUDA_EMULATION_LANGUAGE_H
#define OSCAR_TESTS_CUDA_EMULATION_LANGUAGE_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>

#include "tests/support/cuda_emulation/block.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 {
    unsigned x, y, z;
};
extern struct uint3 threadIdx, blockIdx, blockDim, gridDim; /* of the running thread */

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class A, class B> static constexpr std::common_type_t<A, B> min(A a, B b) {
    using both = std::common_type_t<A, B>;
    return static_cast<both>(b) < static_cast<both>(a) ? static_cast<both>(b) : static_cast<both>(a);
}
template <class A, class B> static constexpr std::common_type_t<A, B> max(A a, B b) {
    using both = std::common_type_t<A, B>;
    return static_cast<both>(a) < static_cast<both>(b) ? static_cast<both>(b) : static_cast<both>(a);
}

/* --- bits and numbers --- */

template <class To, class From> static inline To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
static inline uint32_t __float_as_uint(float x) { return emulated_bits<uint32_t>(x); }
static inline int __float_as_int(float x) { return emulated_bits<int>(x); }
static inline float __uint_as_float(uint32_t x) { return emulated_bits<float>(x); }
static inline float __int_as_float(int x) { return emulated_bits<float>(x); }

static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }

/* Byte i of the result is the byte of {y, x} that hex digit i names; digits from 8 on would repeat a sign. */
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t digits) {
    uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    uint32_t to = 0;
    for (int i = 0; i < 4; i++)
        to |= static_cast<uint32_t>(bytes >> (digits >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
    return to;
}

static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __double2float_ru(double x) {
    float nearest = static_cast<float>(x);
    return static_cast<double>(nearest) < x ? nextafterf(nearest, INFINITY) : nearest;
}
static inline int __float2int_rn(float x) {
    if (isnan(x))
        return 0;
    return x >= 0x1p31F ? INT32_MAX : x < -0x1p31F ? INT32_MIN : static_cast<int>(rintf(x));
}

/* --- memory of the device --- */

template <class T> static inline T __ldg(const T *from, EMULATED_PLACE) {
    emulated::check_global(from, sizeof(T), alignof(T), here);
    return *from;
}
template <class T> static inline T __ldcs(const T *from, EMULATED_PLACE) { return __ldg(from, here); }
template <class T> static inline T __ldcg(const T *from, EMULATED_PLACE) { return __ldg(from, here); }
template <class T> static inline void __stcg(T *to, T value, EMULATED_PLACE) {
    emulated::check_global(to, sizeof(T), alignof(T), here);
    *to = value;
}

/* --- threads that meet; a mask is always that of all lanes --- */

static inline void __syncthreads(EMULATED_PLACE) { emulated::block_meet(here); }

static inline void emulated_mask(uint32_t mask, const emulated::place &here) {
    if (mask != 0xFFFFFFFFU)
        emulated::fault(here, "mask %08x: part of a warp is not emulated", mask);
}

static inline void __syncwarp(uint32_t mask = 0xFFFFFFFFU, EMULATED_PLACE) {
    emulated_mask(mask, here);
    if (emulated::warp_meet("__syncwarp", here))
        emulated::warp_met();
}

/* Every lane brings a value and says whose it takes. */
template <class T>
static inline T emulated_shuffle(const char *what, uint32_t mask, T value, unsigned from, const emulated::place &here) {
    struct ask {
        T value;
        unsigned from;
    };
    emulated_mask(mask, here);
    return emulated::together<T>(what, here, ask{value, from}, [](const ask *in, T *out) {
        for (unsigned i = 0; i < emulated::warp_lanes; i++)
            out[i] = in[in[i].from % emulated::warp_lanes].value;
    });
}
template <class T> static inline T __shfl_sync(uint32_t mask, T value, unsigned from, EMULATED_PLACE) {
    return emulated_shuffle("__shfl_sync", mask, value, from, here);
}
template <class T> static inline T __shfl_xor_sync(uint32_t mask, T value, unsigned with, EMULATED_PLACE) {
    return emulated_shuffle("__shfl_xor_sync", mask, value, emulated::lane() ^ with, here);
}
template <class T> static inline T __shfl_up_sync(uint32_t mask, T value, unsigned by, EMULATED_PLACE) {
    unsigned lane = emulated::lane();
    return emulated_shuffle("__shfl_up_sync", mask, value, lane < by ? lane : lane - by, here);
}

/* Every lane takes what `all` makes of all values. */
template <class T, class In, class All>
static inline T emulated_vote(const char *what, uint32_t mask, In value, const emulated::place &here, All all) {
    emulated_mask(mask, here);
    return emulated::together<T>(what, here, value, [&](const In *in, T *out) {
        T result = all(in);
        for (unsigned i = 0; i < emulated::warp_lanes; i++)
            out[i] = result;
    });
}
static inline uint32_t __ballot_sync(uint32_t mask, bool value, EMULATED_PLACE) {
    return emulated_vote<uint32_t>("__ballot_sync", mask, value, here, [](const bool *in) {
        uint32_t bits = 0;
        for (unsigned i = 0; i < emulated::warp_lanes; i++)
            bits |= static_cast<uint32_t>(in[i]) << i;
        return bits;
    });
}
static inline bool __any_sync(uint32_t mask, bool value, EMULATED_PLACE) {
    return __ballot_sync(mask, value, here) != 0;
}
static inline bool __all_sync(uint32_t mask, bool value, EMULATED_PLACE) {
    return __ballot_sync(mask, value, here) == 0xFFFFFFFFU;
}
template <class T> static inline T __reduce_max_sync(uint32_t mask, T value, EMULATED_PLACE) {
    return emulated_vote<T>("__reduce_max_sync", mask, value, here, [](const T *in) {
        T most = in[0];
        for (unsigned i = 1; i < emulated::warp_lanes; i++)
            most = in[i] > most ? in[i] : most;
        return most;
    });
}
template <class T> static inline T __reduce_add_sync(uint32_t mask, T value, EMULATED_PLACE) {
    return emulated_vote<T>("__reduce_add_sync", mask, value, here, [](const T *in) {
        std::make_unsigned_t<T> sum = 0;
        for (unsigned i = 0; i < emulated::warp_lanes; i++)
            sum += static_cast<std::make_unsigned_t<T>>(in[i]);
        return static_cast<T>(sum);
    });
}

#endif
