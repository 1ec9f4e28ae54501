/* SPDX-License-Identifier: Apache-2.0 */
/*
 * K of the heads with a centre or feedback. A block takes a head's rows of a page and has one warp for every 32 dims; a
 * thread has two rows, and of their dims two panels of 16 in registers: panel w and the w-th from the top, which makes
 * the warps' work equal.
 *
 *   1. x = row - centre, to shared memory, [dim][row];
 *   2. a row's scale and zero and its three edges (quantiser.cuh);
 *   3. codes, from the top dim down, eight dims a step. With feedback the warp that owns a step's dims codes them one
 *      after the other and puts their errors where x was; after a barrier every warp takes the terms of these errors
 *      into its lower dims, the owner of the next step first into that, then it codes it while the others are still at
 *      theirs. So each dim sees its terms in the oracle's order, each by one fma;
 *   4. codes to the byte order of the page.
 */
#ifndef OSCAR_KERNELS_CUDA_PACK_SHAPED_CUH
#define OSCAR_KERNELS_CUDA_PACK_SHAPED_CUH

#include "kernels/cuda/pack_common.cuh"

#define ROWS 64
#define PANEL 16 /* dims */
#define STEP 8   /* dims */
#define OWN_ROWS 2

/* t of a panel: dims x rows of a thread; also x and the centre. */
typedef float panel_values[PANEL][OWN_ROWS];

#define STEPS_OF_L 3 /* rows of L in shared memory: in use by the owner of a step and by the others, and on their way */

template <int D> struct shaped_shared {
    union {
        float x[D][ROWS];                        /* row less centre; from the step under way on, errors */
        struct {                                 /* before: what the centre is made of */
            float turn[CUDA_MAX_PAIRS][2][ROWS]; /* cos and sin */
            float factor[2][CUDA_MAX_PAIRS][D];  /* of these */
        };
    };
    float l[STEPS_OF_L][STEP][D];
    uint32_t codes[D / PANEL][ROWS]; /* two bits a dim */
    float edge[3][ROWS];
    uint32_t scale[ROWS]; /* scale | zero << 16 */
};

__device__ __forceinline__ void load(float (&to)[4], const float *from) {
    float4 v = *(const float4 *)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ __forceinline__ void load(float (&to)[OWN_ROWS], const float *from) {
    float2 v = *(const float2 *)from;
    to[0] = v.x, to[1] = v.y;
}

__device__ __forceinline__ void store(float *to, const float (&from)[OWN_ROWS]) {
    *(float2 *)to = make_float2(from[0], from[1]);
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000U); }

/* Everything that the centre of a page is made of, to shared memory. */
template <int D>
__device__ __forceinline__ void shaped_turns(const struct cuda_pack_params &params, const struct cuda_head &head,
                                             uint32_t item, shaped_shared<D> &shared) {
    const uint32_t dim = threadIdx.x % (D / 4) * 4, row = threadIdx.x % ROWS;
    for (uint32_t pair = threadIdx.x / (D / 4); pair < head.pairs; pair += 4) {
        copy_16(&shared.factor[0][pair][dim], head.centre_cos + pair * D + dim);
        copy_16(&shared.factor[1][pair][dim], head.centre_sin + pair * D + dim);
    }
    const uint32_t frequencies = params.calibration.frequencies;
    const float2 *page_turn = (const float2 *)params.calibration.page_turn + (size_t)params.page[item] * frequencies;
    const float2 *row_turn = (const float2 *)params.calibration.row_turn + row * frequencies;
    for (uint32_t pair = threadIdx.x / ROWS; pair < head.pairs; pair += D / ROWS) {
        float2 e = page_turn[head.centre_pair[pair]];
        float2 t = row_turn[head.centre_pair[pair]];
        shared.turn[pair][0][row] = __fmaf_rn(e.x, t.x, -(e.y * t.y));
        shared.turn[pair][1][row] = __fmaf_rn(e.y, t.x, e.x * t.y);
    }
    copies_arrive();
    __syncthreads();
}

/* c'(position) of two panels, in the order of oscar_codec_centre(). */
template <int D>
__device__ __forceinline__ void shaped_centre(const struct cuda_head &head, const int (&panel)[2], int row,
                                              const shaped_shared<D> &shared, panel_values (&centre)[2]) {
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int j = 0; j < PANEL; j++) {
            float value = head.centre_static ? head.centre_static[PANEL * panel[p] + j] : 0.0F;
#pragma unroll
            for (int r = 0; r < OWN_ROWS; r++)
                centre[p][j][r] = value;
        }
    for (uint32_t i = 0; i < head.pairs; i++) {
        float cosine[OWN_ROWS], sine[OWN_ROWS];
        load(cosine, &shared.turn[i][0][row]);
        load(sine, &shared.turn[i][1][row]);
#pragma unroll
        for (int p = 0; p < 2; p++)
#pragma unroll
            for (int j = 0; j < PANEL; j += 4) {
                float a[4], b[4];
                load(a, &shared.factor[0][i][PANEL * panel[p] + j]);
                load(b, &shared.factor[1][i][PANEL * panel[p] + j]);
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int r = 0; r < OWN_ROWS; r++)
                        centre[p][j + k][r] = __fmaf_rn(sine[r], b[k], __fmaf_rn(cosine[r], a[k], centre[p][j + k][r]));
            }
    }
}

/* Step 1. */
template <int D>
__device__ __forceinline__ void shaped_load(const struct cuda_pack_params &params, const struct cuda_head &head,
                                            uint32_t record, uint32_t item, const int (&panel)[2], int row,
                                            shaped_shared<D> &shared) {
    const uint8_t *dense = params.dense[item] + (size_t)record * (256 * D) + (size_t)row * (2 * D);
    uint4 words[2][PANEL / 8][OWN_ROWS];
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int j = 0; j < PANEL / 8; j++)
#pragma unroll
            for (int r = 0; r < OWN_ROWS; r++)
                words[p][j][r] = *(const uint4 *)(dense + r * (2 * D) + 2 * (PANEL * panel[p] + 8 * j));
    panel_values centre[2];
    if (head.pairs > 0)
        shaped_turns<D>(params, head, item, shared);
    shaped_centre<D>(head, panel, row, shared, centre);
    if (head.pairs > 0)
        __syncthreads(); /* x takes the place of what the centre was made of */
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int j = 0; j < PANEL; j++) {
            float x[OWN_ROWS];
#pragma unroll
            for (int r = 0; r < OWN_ROWS; r++) {
                const uint4 &w = words[p][j / 8][r];
                uint32_t pair = j % 8 < 2 ? w.x : j % 8 < 4 ? w.y : j % 8 < 6 ? w.z : w.w;
                x[r] = (j % 2 ? bf16_high(pair) : bf16_low(pair)) - centre[p][j][r];
            }
            store(&shared.x[PANEL * panel[p] + j][row], x);
        }
}

/* Step 2. The clip rank by the upper half of each element's bits, then, where a centre filled them, by the lower. */
template <int D>
__device__ __forceinline__ void shaped_scales(const struct cuda_pack_params &params, const struct cuda_head &head,
                                              uint32_t record, uint32_t item, shaped_shared<D> &shared) {
    constexpr int LANES = D / ROWS; /* that share a row */
    constexpr int GROUPS = D / 32 / LANES;
    const int row = threadIdx.x / LANES;
    const float(*x)[ROWS] = &shared.x[threadIdx.x % LANES * (D / LANES)];
    uint32_t planes[GROUPS][PLANES], candidates[GROUPS];
    float low = x[0][row], high = x[0][row], finite = 0.0F; /* NaN after one that is not */
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < PLANES; i++) {
            float even = x[32 * g + 2 * i][row], odd = x[32 * g + 2 * i + 1][row];
            low = fminf(low, fminf(even, odd));
            high = fmaxf(high, fmaxf(even, odd));
            finite = __fmaf_rn(even, 0.0F, __fmaf_rn(odd, 0.0F, finite));
            planes[g][i] = __byte_perm(__float_as_uint(even), __float_as_uint(odd), 0x7632);
        }
        planes_make(planes[g]);
        candidates[g] = ~0U;
    }
    uint32_t from_top = D - head.rank_k;
    uint32_t threshold = planes_select<15, LANES>(planes, candidates, from_top) << 16;
    if (head.centre_static) {
        asm volatile("" ::: "memory"); /* read x again: kept, it would not fit in registers */
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
#pragma unroll
            for (int i = 0; i < PLANES; i++)
                planes[g][i] = __byte_perm(__float_as_uint(x[32 * g + 2 * i][row]),
                                           __float_as_uint(x[32 * g + 2 * i + 1][row]), 0x5410);
            planes_make(planes[g]);
        }
        threshold |= planes_select<16, LANES>(planes, candidates, from_top);
    }
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2) {
        low = fminf(low, __shfl_xor_sync(0xFFFFFFFFU, low, apart));
        high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFU, high, apart));
        finite += __shfl_xor_sync(0xFFFFFFFFU, finite, apart);
    }
    struct quantiser quantiser;
    bool fits = quantiser_make(low, high, __uint_as_float(threshold), &quantiser);
    if (threadIdx.x % LANES != 0)
        return;
#pragma unroll
    for (int code = 1; code < 4; code++)
        shared.edge[code - 1][row] = quantiser_edge(&quantiser, code);
    shared.scale[row] = quantiser.bits;
    if (!(fits && finite == 0.0F))
        params.status[item] = OSCAR_ERR_NOT_FINITE;
    uint8_t *packed = params.packed[item] + (size_t)record * PACKED_RECORD_BYTES(D);
    *(uint32_t *)(packed + scale_offset(D, row)) = quantiser.bits;
}

/* A thread's place in a step's rows of L, of which it copies 16 bytes in either half of the columns. */
template <int D> __device__ __forceinline__ int shaped_place() {
    return threadIdx.x % STEP * D + threadIdx.x / STEP * 4;
}

/* Columns 0 .. 8 step + 7 of L's rows 8 step .. 8 step + 7; `from` and `to` are the thread's place. */
template <int D> __device__ __forceinline__ void shaped_fetch(const float *from, int step, float *to) {
    const int column = threadIdx.x / STEP * 4;
#pragma unroll
    for (int half = 0; half < D; half += D / 2)
        if (column + half < STEP * (step + 1))
            copy_16(to + half, from + half);
}

/* One error's terms. */
__device__ __forceinline__ void shaped_terms(const float *l, const float (&error)[OWN_ROWS], panel_values &t) {
#pragma unroll
    for (int j = 0; j < PANEL; j += 4) {
        float factor[4];
        load(factor, l + j);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int r = 0; r < OWN_ROWS; r++)
                t[j + k][r] = __fmaf_rn(-factor[k], error[r], t[j + k][r]);
    }
}

/* The terms of a step's errors, for a panel below them or for two; `l`: the step's rows of L. */
template <int D>
__device__ __forceinline__ void shaped_update(const float (*error)[ROWS], const float *l, int row, int panel,
                                              panel_values &t) {
#pragma unroll 2
    for (int i = STEP - 1; i >= 0; i--) {
        float e[OWN_ROWS];
        load(e, &error[i][row]);
        shaped_terms(l + i * D + PANEL * panel, e, t);
    }
}
template <int D>
__device__ __forceinline__ void shaped_update(const float (*error)[ROWS], const float *l, int row,
                                              const int (&panel)[2], panel_values &a, panel_values &b) {
#pragma unroll 2
    for (int i = STEP - 1; i >= 0; i--) {
        float e[OWN_ROWS];
        load(e, &error[i][row]);
        shaped_terms(l + i * D + PANEL * panel[0], e, a);
        shaped_terms(l + i * D + PANEL * panel[1], e, b);
    }
}

/* Codes the upper (HALF 1) or lower step of a panel; with feedback each code's error is taken into the panel's lower
 * dims. `upper`: the codes of the upper step until the lower ones are there. The next dim waits for each error: its
 * terms come first, and no store stands between it and what is loaded. */
template <int D, int HALF>
__device__ __forceinline__ void shaped_code(shaped_shared<D> &shared, const float *step_l, bool feedback, int panel,
                                            int row, panel_values &t, uint32_t (&upper)[OWN_ROWS]) {
    constexpr int BASE = HALF * STEP;
    float edge[3][OWN_ROWS], scale[OWN_ROWS], zero[OWN_ROWS], codes[OWN_ROWS], error[STEP][OWN_ROWS];
#pragma unroll
    for (int e = 0; e < 3; e++)
        load(edge[e], &shared.edge[e][row]);
#pragma unroll
    for (int r = 0; r < OWN_ROWS; r++) {
        scale[r] = __half2float(__ushort_as_half((uint16_t)shared.scale[row + r]));
        zero[r] = __half2float(__ushort_as_half((uint16_t)(shared.scale[row + r] >> 16)));
        codes[r] = 0.0F;
    }
    float(*own)[ROWS] = &shared.x[PANEL * panel + BASE];
#pragma unroll
    for (int i = STEP - 1; i >= 0; i--) {
        float x[OWN_ROWS];
        load(x, &own[i][row]);
#pragma unroll
        for (int r = 0; r < OWN_ROWS; r++) {
            float value = t[BASE + i][r]; /* the code of a NaN is 0 */
            float code = one_from(value, edge[0][r]) + one_from(value, edge[1][r]) + one_from(value, edge[2][r]);
            codes[r] = __fmaf_rn(codes[r], 4.0F, code);
            error[i][r] = __fmaf_rn(code - zero[r], scale[r], -x[r]);
        }
        if (!feedback)
            continue;
        const float *l = step_l + i * D + PANEL * panel;
#pragma unroll
        for (int j = BASE + STEP - 4; j >= 0; j -= 4) {
            if (j >= BASE + i)
                continue;
            float factor[4];
            load(factor, l + j);
#pragma unroll
            for (int k = 3; k >= 0; k--)
                if (j + k < BASE + i)
#pragma unroll
                    for (int r = 0; r < OWN_ROWS; r++)
                        t[j + k][r] = __fmaf_rn(-factor[k], error[i][r], t[j + k][r]);
        }
    }
#pragma unroll
    for (int i = 0; i < STEP; i++)
        store(&own[i][row], error[i]);
#pragma unroll
    for (int r = 0; r < OWN_ROWS; r++) { /* a whole number below 2^16, put on the last bits of a significand */
        uint32_t bits = __float_as_uint(codes[r] + 0x1p23F) & 0xFFFFU;
        if (HALF == 1)
            upper[r] = bits << 16;
        else
            shared.codes[panel][row + r] = upper[r] | bits;
    }
}

/* Four codes, two bits each, as one byte each. */
__device__ __forceinline__ uint32_t spread(uint32_t codes) {
    return (codes | codes << 6 | codes << 12 | codes << 18) & 0x03030303U;
}

/* Step 4: 16 bytes a thread. */
template <int D>
__device__ __forceinline__ void shaped_write(const struct cuda_pack_params &params, uint32_t record, uint32_t item,
                                             const shaped_shared<D> &shared) {
    constexpr int W = D / 64;
    const uint32_t thread = threadIdx.x;
    uint32_t words[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) { /* word [tile][g][t][half][w] */
        uint32_t at = 4 * thread + i;
        uint32_t w = at % W, half = at / W % 2, t = at / (2 * W) % 4, g = at / (8 * W) % 8, tile = at / (64 * W);
        words[i] = 0;
#pragma unroll
        for (uint32_t f = 0; f < 4; f++) {
            uint32_t codes = shared.codes[W * f + w][16 * tile + 8 * half + g];
            words[i] |= spread(codes >> (8 * t) & 0xFFU) << (2 * f);
        }
    }
    uint8_t *packed = params.packed[item] + (size_t)record * PACKED_RECORD_BYTES(D);
    ((uint4 *)packed)[thread] = make_uint4(words[0], words[1], words[2], words[3]);
}

/* Step 3: the upper half of the dims, in which every warp owns one panel, then the lower half, whose panels take terms
 * meanwhile. One loop for both: the code has to stay small enough for the instruction cache (two: a third slower). */
template <int D>
__device__ __forceinline__ void shaped_steps(const float *feedback, const int (&panel)[2], int row,
                                             shaped_shared<D> &shared) {
    constexpr int STEPS = D / STEP;
    const int place = shaped_place<D>();
    panel_values next, later;
#pragma unroll
    for (int j = 0; j < PANEL; j++) {
        load(next[j], &shared.x[PANEL * panel[0] + j][row]);
        load(later[j], &shared.x[PANEL * panel[1] + j][row]);
    }
    uint32_t upper[OWN_ROWS];
    float *l_above = shared.l[0][0], *l = shared.l[1][0], *l_below = shared.l[2][0];
    int from = (STEPS - 2) * STEP * D + place;
#pragma unroll 1
    for (int half = 1; half >= 0; half--) {
        const int own = half ? panel[0] : panel[1];
#pragma unroll 1
        for (int step = STEPS / 2 * (half + 1) - 1; step >= STEPS / 2 * half; step--) {
            const int above = step + 1; /* the step whose errors are new */
            const bool codes = step / 2 == own, errors = feedback && above < STEPS;
            const bool open = own < above / 2; /* the errors have terms for `next` */
            const float(*error)[ROWS] = shared.x + STEP * above;
            if (feedback && step > 0)
                shaped_fetch<D>(feedback + from, step - 1, l_below + place);
            if (errors && open && half && !codes)
                shaped_update<D>(error, l_above, row, panel, next, later);
            else if (errors && open)
                shaped_update<D>(error, l_above, row, own, next);
            if (codes && step % 2 == 1)
                shaped_code<D, 1>(shared, l, feedback != nullptr, own, row, next, upper);
            else if (codes)
                shaped_code<D, 0>(shared, l, feedback != nullptr, own, row, next, upper);
            if (errors && half && (codes || !open))
                shaped_update<D>(error, l_above, row, panel[1], later);
            from -= STEP * D;
            float *l_free = l_above;
            l_above = l, l = l_below, l_below = l_free;
            if (feedback) {
                copies_arrive();
                __syncthreads();
            }
        }
#pragma unroll
        for (int j = 0; j < PANEL; j++)
#pragma unroll
            for (int r = 0; r < OWN_ROWS; r++)
                next[j][r] = later[j][r];
    }
    __syncthreads();
}

template <int D> __device__ __forceinline__ void pack_shaped(const struct cuda_pack_params &params) {
    constexpr int PANELS = D / PANEL;
    shaped_shared<D> &shared = *(shaped_shared<D> *)block_memory();
    const uint32_t item = blockIdx.x, record = blockIdx.y;
    const struct cuda_head &head = params.calibration.heads[record];
    const float *feedback = head.feedback;
    if (!feedback && !head.centre_static)
        return;
    const int warp = threadIdx.x / 32, row = threadIdx.x % 32 * OWN_ROWS;
    const int panel[2] = {PANELS - 1 - warp, warp};
    if (feedback)
        shaped_fetch<D>(feedback + (D - STEP) * D + shaped_place<D>(), D / STEP - 1,
                        shared.l[1][0] + shaped_place<D>());
    shaped_load<D>(params, head, record, item, panel, row, shared);
    copies_arrive();
    __syncthreads();
    shaped_scales<D>(params, head, record, item, shared);
    __syncthreads();
    shaped_steps<D>(feedback, panel, row, shared);
    shaped_write<D>(params, record, item, shared);
}

#endif
