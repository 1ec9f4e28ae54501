/* SPDX-License-Identifier: Apache-2.0 */
/* In place of kernels/cuda/instructions.cuh: the same functions. Fragments of matrices as in the PTX ISA's chapter on mma. */
#ifndef OSCAR_KERNELS_CUDA_INSTRUCTIONS_CUH
#define OSCAR_KERNELS_CUDA_INSTRUCTIONS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define WARP_LANES 0xFFFFFFFFU

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CUDA_BULK_COPIES 1
#else
#define CUDA_BULK_COPIES 0
#endif

static inline uint32_t rare_lane() { return emulated::lane(); }
static inline uint8_t *block_memory() { return emulated::shared_memory(); }
static inline uint32_t shared_address(const void *pointer, EMULATED_PLACE) {
    return emulated::shared_offset(pointer, here);
}

static inline uint32_t load_shared(uint32_t address, EMULATED_PLACE) {
    return emulated::shared_load<uint32_t>(address, here);
}
static inline uint2 load_shared2(uint32_t address, EMULATED_PLACE) {
    return emulated::shared_load<uint2>(address, here);
}
static inline uint4 load_shared4(uint32_t address, EMULATED_PLACE) {
    return emulated::shared_load<uint4>(address, here);
}
static inline float4 load_shared_floats(uint32_t address, EMULATED_PLACE) {
    return emulated::shared_load<float4>(address, here);
}
static inline void store_shared(uint32_t address, float value, EMULATED_PLACE) {
    emulated::shared_store(address, value, here);
}
static inline void store_shared(uint32_t address, uint32_t value, EMULATED_PLACE) {
    emulated::shared_store(address, value, here);
}
static inline void store_shared4(uint32_t address, uint4 value, EMULATED_PLACE) {
    emulated::shared_store(address, value, here);
}

static inline bool one_lane(EMULATED_PLACE) {
    emulated::together<uint32_t>("elect", here, 0U, [](const uint32_t *, uint32_t *) {});
    return emulated::lane() == 0;
}

/* --- arithmetic --- */

/* ftz: subnormal results are zeros. */
static inline float exp2_approx(float x) {
    float y = exp2f(x);
    return y < 0x1p-126F ? 0.0F : y;
}
static inline float log2_approx(float x) { return log2f(x); }
static inline uint32_t half_pair(float low, float high) {
    return emulated_bits<uint32_t>(__floats2half2_rn(low, high));
}
static inline float2 half_floats(uint32_t pair) { return __half22float2(emulated_bits<__half2>(pair)); }
static inline float half_low(uint32_t pair) { return half_floats(pair).x; }
static inline float half_high(uint32_t pair) { return half_floats(pair).y; }
static inline uint32_t bfloat_pair(float low, float high) {
    return emulated_bits<uint32_t>(__floats2bfloat162_rn(low, high));
}
static inline float2 bfloat_floats(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U));
}

static inline uint32_t emulated_bfloat_pick(uint32_t a, uint32_t b, bool greatest) {
    uint32_t to = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        uint32_t x = a >> shift & 0xFFFF, y = b >> shift & 0xFFFF;
        float fx = __uint_as_float(x << 16), fy = __uint_as_float(y << 16);
        bool first = fx == fy ? (x >> 15 != 0) != greatest : (fx < fy) != greatest; /* -0 is less than 0 */
        to |= (isnan(fx) || isnan(fy) ? 0x7FFF : first ? x : y) << shift;
    }
    return to;
}
static inline uint32_t bits_chosen(uint32_t mask, uint32_t one, uint32_t other) {
    return (one & mask) | (other & ~mask);
}
static inline uint32_t bfloat_least(uint32_t a, uint32_t b) { return emulated_bfloat_pick(a, b, false); }
static inline uint32_t bfloat_greatest(uint32_t a, uint32_t b) { return emulated_bfloat_pick(a, b, true); }

static inline float one_from(float value, float edge) { return value >= edge ? 1.0F : 0.0F; }

/* --- matrices --- */

static inline uint32_t transpose(uint32_t x, EMULATED_PLACE) {
    return emulated::together<uint32_t>("movmatrix", here, x, [](const uint32_t *in, uint32_t *out) {
        for (unsigned i = 0; i < 32; i++) {
            unsigned g = i / 4, t = i % 4; /* column g of rows 2t and 2t + 1 */
            uint32_t low = in[4 * (2 * t) + g / 2] >> g % 2 * 16, high = in[4 * (2 * t + 1) + g / 2] >> g % 2 * 16;
            out[i] = (low & 0xFFFF) | high << 16;
        }
    });
}

struct emulated_registers {
    uint32_t x[4];
};
static inline void emulated_load_matrices(uint32_t (&x)[4], uint32_t address, bool transposed,
                                          const emulated::place &here) {
    const uint8_t *row = emulated::shared_at(address, 16, 16, here);
    auto loaded = emulated::together<emulated_registers>(
        "ldmatrix", here, row, [transposed](const uint8_t *const *rows, emulated_registers *out) {
            for (unsigned i = 0; i < 32; i++)
                for (unsigned matrix = 0; matrix < 4; matrix++)
                    for (unsigned e = 0; e < 2; e++) {
                        unsigned g = i / 4, k = i % 4 * 2 + e;
                        const uint8_t *from = rows[8 * matrix + (transposed ? k : g)] + 2 * (transposed ? g : k);
                        memcpy(reinterpret_cast<uint8_t *>(&out[i].x[matrix]) + 2 * e, from, 2);
                    }
        });
    memcpy(x, loaded.x, sizeof(x));
}
static inline void load_matrices(uint32_t (&x)[4], uint32_t address, EMULATED_PLACE) {
    emulated_load_matrices(x, address, false, here);
}
static inline void load_transposed(uint32_t (&x)[4], uint32_t address, EMULATED_PLACE) {
    emulated_load_matrices(x, address, true, here);
}

/* Elements of a register, and sums of their products: exact, then cut. */
struct emulated_half {
    static constexpr unsigned each = 2;
    typedef float result;
    static double a(uint32_t word, unsigned i) { return emulated::half_values[word >> 16 * i & 0xFFFF]; }
    static double b(uint32_t word, unsigned i) { return a(word, i); }
    static float end(double sum) {
        float nearest = static_cast<float>(sum);
        bool beyond = fabs(static_cast<double>(nearest)) > fabs(sum) && isfinite(nearest);
        return __uint_as_float(__float_as_uint(nearest) - beyond);
    }
};
struct emulated_bfloat : emulated_half {
    static double a(uint32_t word, unsigned i) { return __uint_as_float(word >> 16 * i << 16); }
    static double b(uint32_t word, unsigned i) { return a(word, i); }
};
struct emulated_codes { /* unsigned bytes times signed ones */
    static constexpr unsigned each = 4;
    typedef int result;
    static double a(uint32_t word, unsigned i) { return static_cast<uint8_t>(word >> 8 * i); }
    static double b(uint32_t word, unsigned i) { return static_cast<int8_t>(word >> 8 * i); }
    static int end(double sum) { return static_cast<int>(sum); }
};
struct emulated_bytes : emulated_codes { /* unsigned bytes times unsigned ones */
    static double b(uint32_t word, unsigned i) { return a(word, i); }
};

/* d = a b + c, m16n8: A has REGISTERS registers, B half as many. */
template <class Type, unsigned REGISTERS>
static inline void emulated_multiply(typename Type::result (&d)[4], const uint32_t (&a)[REGISTERS],
                                     const uint32_t (&b)[REGISTERS / 2], const typename Type::result (&c)[4],
                                     const emulated::place &here) {
    static constexpr unsigned each = Type::each, depth = REGISTERS / 2 * 4 * each;
    struct share {
        uint32_t a[REGISTERS], b[REGISTERS / 2];
        typename Type::result c[4];
    } share;
    struct sums {
        typename Type::result d[4];
    };
    memcpy(share.a, a, sizeof(share.a));
    memcpy(share.b, b, sizeof(share.b));
    memcpy(share.c, c, sizeof(share.c));
    auto result = emulated::together<sums>("mma", here, share, [](const struct share *in, sums *out) {
        double left[16][depth], right[depth][8], sum[16][8] = {};
        for (unsigned i = 0; i < 32; i++)
            for (unsigned e = 0; e < each; e++) {
                unsigned g = i / 4, k = i % 4 * each + e;
                for (unsigned r = 0; r < REGISTERS; r++)
                    left[g + r % 2 * 8][k + r / 2 * 4 * each] = Type::a(in[i].a[r], e);
                for (unsigned r = 0; r < REGISTERS / 2; r++)
                    right[k + r * 4 * each][g] = Type::b(in[i].b[r], e);
            }
        for (unsigned row = 0; row < 16; row++)
            for (unsigned k = 0; k < depth; k++)
                for (unsigned column = 0; column < 8; column++)
                    sum[row][column] += left[row][k] * right[k][column];
        for (unsigned i = 0; i < 32; i++)
            for (unsigned e = 0; e < 4; e++)
                out[i].d[e] = Type::end(sum[i / 4 + e / 2 * 8][i % 4 * 2 + e % 2] + static_cast<double>(in[i].c[e]));
    });
    memcpy(d, result.d, sizeof(d));
}

static inline void multiply_codes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                  uint32_t b1, EMULATED_PLACE) {
    emulated_multiply<emulated_codes, 4>(c, {a0, a1, a2, a3}, {b0, b1}, c, here);
}
static inline void multiply_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                  uint32_t b1, EMULATED_PLACE) {
    emulated_multiply<emulated_bytes, 4>(c, {a0, a1, a2, a3}, {b0, b1}, c, here);
}
static inline void multiply_half(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                 uint32_t b1, EMULATED_PLACE) {
    emulated_multiply<emulated_half, 4>(c, {a0, a1, a2, a3}, {b0, b1}, c, here);
}
static inline void multiply_half(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1, const float (&c)[4],
                                 EMULATED_PLACE) {
    emulated_multiply<emulated_half, 4>(d, {a.x, a.y, a.z, a.w}, {b0, b1}, c, here);
}
static inline void multiply_bfloat(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                   uint32_t b1, EMULATED_PLACE) {
    emulated_multiply<emulated_bfloat, 4>(c, {a0, a1, a2, a3}, {b0, b1}, c, here);
}
static inline void multiply_bfloat(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0, EMULATED_PLACE) {
    emulated_multiply<emulated_bfloat, 2>(c, {a0, a1}, {b0}, c, here);
}

/* --- copies from global to shared memory --- */

static inline void copy_16(uint32_t to, uint64_t from, EMULATED_PLACE) {
    emulated::copy_later(to, reinterpret_cast<const void *>(from), here);
}
static inline void copy_16(void *to, const void *from, EMULATED_PLACE) {
    emulated::copy_later(emulated::shared_offset(to, here), from, here);
}
static inline void copies_commit() { emulated::copies_close(); }
template <int PENDING> static inline void copies_wait() { emulated::copies_finish(PENDING); }
static inline void copies_arrive() { emulated::copies_finish_all(); }

#if CUDA_BULK_COPIES
static inline void barrier_open(uint32_t barrier, EMULATED_PLACE) { emulated::copy_barrier_open(barrier, here); }
static inline void barriers_opened() {}
static inline void barrier_expect(uint32_t barrier, uint32_t bytes, EMULATED_PLACE) {
    emulated::copy_barrier_expect(barrier, bytes, here);
}
static inline void barrier_wait(uint32_t barrier, uint32_t parity, EMULATED_PLACE) {
    emulated::copy_barrier_wait(barrier, parity, here);
}
static inline void copy_bulk(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier, EMULATED_PLACE) {
    emulated::copy_bulk_later(to, reinterpret_cast<const void *>(from), bytes, barrier, here);
}
#endif
static inline void copies_follow_stores() {}

static inline uint32_t arrive(uint32_t *counter, EMULATED_PLACE) {
    emulated::check_global(counter, sizeof(*counter), sizeof(*counter), here);
    return __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL);
}

#endif
