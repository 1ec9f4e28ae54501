/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Instructions that have no name in CUDA C++, and the block's shared memory: all inline assembly of the kernels is here, so
 * that tests/support/cuda_emulation can stand in for it. Addresses of shared memory are 32-bit. Matrix fragments: lane 4g + t
 * of a warp; A has rows g and g + 8, B column g, C rows g and g + 8 of columns 2t and 2t + 1.
 */
#ifndef OSCAR_KERNELS_CUDA_INSTRUCTIONS_CUH
#define OSCAR_KERNELS_CUDA_INSTRUCTIONS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define WARP_LANES 0xFFFFFFFFU

/* Bulk copies and transaction barriers came with compute capability 9.0. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(CUDA_PLAIN_COPIES)
#define CUDA_BULK_COPIES 1
#else
#define CUDA_BULK_COPIES 0
#endif

/* The lane, for code that rarely runs: read anew, so that nothing derived from it takes a register in between. */
static __device__ __forceinline__ uint32_t rare_lane() {
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* The shared memory that the launch asked for. */
static __device__ __forceinline__ uint8_t *block_memory() {
    extern __shared__ __align__(128) uint8_t memory[];
    return memory;
}

static __device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

static __device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}
static __device__ __forceinline__ uint2 load_shared2(uint32_t address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
    return x;
}
static __device__ __forceinline__ uint4 load_shared4(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address));
    return x;
}
static __device__ __forceinline__ float4 load_shared_floats(uint32_t address) {
    uint4 x = load_shared4(address);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}
static __device__ __forceinline__ void store_shared(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
static __device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
static __device__ __forceinline__ void store_shared4(uint32_t address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

/* True in one lane of the warp. */
static __device__ __forceinline__ bool one_lane() {
#if CUDA_BULK_COPIES
    uint32_t is;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "elect.sync _|p, 0xFFFFFFFF;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(is));
    return is != 0;
#else
    return rare_lane() == 0;
#endif
}

/* --- arithmetic --- */

static __device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ uint32_t half_pair(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}
static __device__ __forceinline__ float2 half_floats(uint32_t pair) {
    return __half22float2(*reinterpret_cast<__half2 *>(&pair));
}
static __device__ __forceinline__ float half_low(uint32_t pair) {
    return __low2float(*reinterpret_cast<__half2 *>(&pair));
}
static __device__ __forceinline__ float half_high(uint32_t pair) {
    return __high2float(*reinterpret_cast<__half2 *>(&pair));
}
static __device__ __forceinline__ uint32_t bfloat_pair(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}
static __device__ __forceinline__ float2 bfloat_floats(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000U));
}

/* The bits of `one` where `mask` has ones, else those of `other`: one operation; of a constant mask C++ makes two. */
static __device__ __forceinline__ uint32_t bits_chosen(uint32_t mask, uint32_t one, uint32_t other) {
    uint32_t x;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(x) : "r"(mask), "r"(one), "r"(other));
    return x;
}

/* Least and greatest of each half of two BF16 pairs; a NaN stays. */
static __device__ __forceinline__ uint32_t bfloat_least(uint32_t a, uint32_t b) {
    asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
static __device__ __forceinline__ uint32_t bfloat_greatest(uint32_t a, uint32_t b) {
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

/* 1 where value >= edge, else, as for a NaN, 0. */
static __device__ __forceinline__ float one_from(float value, float edge) {
    float one;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(value), "f"(edge));
    return one;
}

/* --- matrices --- */

/* Lane 4g + t holds elements (g, 2t) and (g, 2t + 1) of an 8 x 8 matrix; afterwards those of its transpose. */
static __device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* Four 8 x 8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i. */
static __device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
/* The same, each transposed. */
static __device__ __forceinline__ void load_transposed(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

/* c += a b, m16n8k32: codes times signed bytes. */
static __device__ __forceinline__ void multiply_codes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                      uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* The same, codes times unsigned bytes. */
static __device__ __forceinline__ void multiply_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                      uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* c += a b, m16n8k16 of FP16. */
static __device__ __forceinline__ void multiply_half(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                     uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* d = a b + c, m16n8k16 of FP16. */
static __device__ __forceinline__ void multiply_half(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1,
                                                     const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* c += a b, m16n8k16 of BF16. */
static __device__ __forceinline__ void multiply_bfloat(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                       uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* c += a b, m16n8k8 of BF16. */
static __device__ __forceinline__ void multiply_bfloat(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

/* --- copies from global to shared memory --- */

static __device__ __forceinline__ void copy_16(uint32_t to, uint64_t from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
static __device__ __forceinline__ void copy_16(void *to, const void *from) {
    copy_16(shared_address(to), reinterpret_cast<uint64_t>(from));
}
static __device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Until at most PENDING of the thread's committed groups are on their way. */
template <int PENDING> static __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
/* Until all of its copies are there, committed or not. */
static __device__ __forceinline__ void copies_arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#if CUDA_BULK_COPIES

static __device__ __forceinline__ void barrier_open(uint32_t barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
/* Makes opened barriers known to the copy engine. */
static __device__ __forceinline__ void barriers_opened() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* The barrier's phase ends when `bytes` bytes have arrived. */
static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@done bra.uni ended;\n"
                 "bra.uni again;\n"
                 "ended:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
/* Pages stream through the second-level cache, which gives them up before what every launch reads. */
static __device__ __forceinline__ void copy_bulk(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
    const uint64_t evict_first = 0x12F0000000000000U; /* what createpolicy makes of it */
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(evict_first)
                 : "memory");
}
/* Shared memory that was written by stores may be written by copies now. */
static __device__ __forceinline__ void copies_follow_stores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#else

static __device__ __forceinline__ void copies_follow_stores() {}

#endif

/* Visible to all other blocks of the device before what follows, and the reverse. */
static __device__ __forceinline__ uint32_t arrive(uint32_t *counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

#endif
