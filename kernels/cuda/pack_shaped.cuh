/* SPDX-License-Identifier: Apache-2.0 */
/*
 * K of the heads with a centre or feedback. A block takes a head's rows of two pages and has one warp for every 32 dims; a
 * thread has four rows, and of their dims two panels of 16 in registers: panel w and the w-th from the top, which makes the
 * warps' work equal.
 *
 *   1. x = row - centre, to shared memory, [dim][row];
 *   2. a row's scale and zero and its three edges (quantiser.cuh), a thread (of head size 256 two) a row;
 *   3. feedback, from the top dim down, eight dims a step: the warp that owns them codes them, one after the other, and puts their
 *      errors where x was; then every warp takes the errors' terms into its lower dims. So each dim sees its terms in the
 *      oracle's order, each by one fma;
 *   4. codes to the byte order of the page.
 *
 * Reading shared memory takes a cycle for each register that a warp's load fills and is what bounds step 3: of a panel 20
 * registers are read for 64 fma, of two at once 36 for 128.
 */
#ifndef OSCAR_KERNELS_CUDA_PACK_SHAPED_CUH
#define OSCAR_KERNELS_CUDA_PACK_SHAPED_CUH

#include "kernels/cuda/pack_common.cuh"

#define ROWS CUDA_PACK_ROWS
#define PANEL 16 /* dims */
#define STEP 8   /* dims */
#define OWN_ROWS 4

/* t of a panel: dims x rows of a thread; also x and the centre. */
typedef float panel_values[PANEL][OWN_ROWS];

template <int D> struct shaped_shared {
    float x[D][ROWS]; /* row less centre; below the step under way the errors; at last a panel's codes, see CODES_OF */
    union {
        float l[2][STEP][D];            /* rows of L of two steps, by turns */
        float turn[D / PANEL][2][ROWS]; /* cos and sin of pairs, before */
    };
    float edge[3][ROWS];
    uint32_t scale[ROWS]; /* scale | zero << 16 */
};

/* A panel's 16 codes of a row are one word, in the row of x that belongs to its top dim, whose error has been used by then. */
#define CODES_OF(panel) (PANEL * (panel) + PANEL - 1)

__device__ __forceinline__ void four(float (&to)[OWN_ROWS], const float *from) {
    float4 v = *(const float4 *)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000U); }

/* c'(position) of two panels, in the order of oscar_codec_centre(). */
template <int D>
__device__ __forceinline__ void shaped_centre(const struct cuda_pack_params &params, const struct cuda_head &head,
                                              uint32_t first_item, const int (&panel)[2], shaped_shared<D> &shared,
                                              panel_values (&centre)[2]) {
    constexpr uint32_t CHUNK = D / PANEL; /* pairs whose turns fit in shared memory */
    const uint32_t frequencies = params.calibration.frequencies;
    const int row = threadIdx.x % 32 * OWN_ROWS;
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int j = 0; j < PANEL; j++) {
            float value = head.centre_static ? head.centre_static[PANEL * panel[p] + j] : 0.0F;
#pragma unroll
            for (int r = 0; r < OWN_ROWS; r++)
                centre[p][j][r] = value;
        }
    for (uint32_t first = 0; first < head.pairs; first += CHUNK) {
        const uint32_t count = min(CHUNK, head.pairs - first);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < count * ROWS; i += D) {
            uint32_t frequency = head.centre_pair[first + i / ROWS], at = i % ROWS;
            uint32_t item = min(first_item + at / 64, params.items - 1);
            const float2 *turns = (const float2 *)params.calibration.page_turn;
            float2 e = turns[(size_t)params.page[item] * frequencies + frequency];
            turns = (const float2 *)params.calibration.row_turn;
            float2 t = turns[(size_t)(at % 64) * frequencies + frequency];
            shared.turn[i / ROWS][0][at] = __fmaf_rn(e.x, t.x, -(e.y * t.y));
            shared.turn[i / ROWS][1][at] = __fmaf_rn(e.y, t.x, e.x * t.y);
        }
        __syncthreads();
        for (uint32_t i = 0; i < count; i++) {
            float cosine[OWN_ROWS], sine[OWN_ROWS];
            four(cosine, &shared.turn[i][0][row]);
            four(sine, &shared.turn[i][1][row]);
#pragma unroll
            for (int p = 0; p < 2; p++)
#pragma unroll
                for (int j = 0; j < PANEL; j += 4) {
                    float a[4], b[4];
                    four(a, head.centre_cos + (size_t)(first + i) * D + PANEL * panel[p] + j);
                    four(b, head.centre_sin + (size_t)(first + i) * D + PANEL * panel[p] + j);
#pragma unroll
                    for (int k = 0; k < 4; k++)
#pragma unroll
                        for (int r = 0; r < OWN_ROWS; r++)
                            centre[p][j + k][r] =
                                __fmaf_rn(sine[r], b[k], __fmaf_rn(cosine[r], a[k], centre[p][j + k][r]));
                }
        }
    }
    __syncthreads();
}

/* Step 1. Rows of a page that is not there are zeros. */
template <int D>
__device__ __forceinline__ void shaped_load(const struct cuda_pack_params &params, const struct cuda_head &head,
                                            uint32_t record, uint32_t first_item, const int (&panel)[2],
                                            shaped_shared<D> &shared) {
    panel_values centre[2];
    shaped_centre<D>(params, head, first_item, panel, shared, centre);
    const int row = threadIdx.x % 32 * OWN_ROWS;
    const uint32_t item = first_item + row / 64;
    const bool there = item < params.items;
    const uint8_t *dense =
        params.dense[there ? item : first_item] + (size_t)record * (256 * D) + (size_t)(row % 64) * (2 * D);
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int j = 0; j < PANEL; j += 8) {
            uint4 words[OWN_ROWS];
#pragma unroll
            for (int r = 0; r < OWN_ROWS; r++)
                words[r] =
                    there ? *(const uint4 *)(dense + r * (2 * D) + 2 * (PANEL * panel[p] + j)) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float x[OWN_ROWS];
#pragma unroll
                for (int r = 0; r < OWN_ROWS; r++) {
                    uint32_t pair = k < 2 ? words[r].x : k < 4 ? words[r].y : k < 6 ? words[r].z : words[r].w;
                    x[r] = (k % 2 ? bf16_high(pair) : bf16_low(pair)) - centre[p][j + k][r];
                }
                *(float4 *)&shared.x[PANEL * panel[p] + j + k][row] = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
}

/* Step 2. The clip rank by the upper half of each element's bits, then, where a centre filled them, by the lower. */
template <int D>
__device__ __forceinline__ void shaped_scales(const struct cuda_pack_params &params, const struct cuda_head &head,
                                              uint32_t record, uint32_t first_item, shaped_shared<D> &shared) {
    constexpr int LANES = D > 128 ? 2 : 1;
    constexpr int GROUPS = D / 32 / LANES;
    for (int row = threadIdx.x / LANES; row < ROWS; row += D / LANES) {
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
        if (LANES == 2) {
            low = fminf(low, __shfl_xor_sync(0xFFFFFFFFU, low, 1));
            high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFU, high, 1));
            finite += __shfl_xor_sync(0xFFFFFFFFU, finite, 1);
        }
        struct quantiser quantiser;
        bool fits = quantiser_make(low, high, __uint_as_float(threshold), &quantiser);
        if (threadIdx.x % LANES != 0)
            continue;
#pragma unroll
        for (int code = 1; code < 4; code++)
            shared.edge[code - 1][row] = quantiser_edge(&quantiser, code);
        shared.scale[row] = quantiser.bits;
        uint32_t item = first_item + row / 64;
        if (item >= params.items)
            continue;
        if (!(fits && finite == 0.0F))
            params.status[item] = OSCAR_ERR_NOT_FINITE;
        uint8_t *packed = params.packed[item] + (size_t)record * PACKED_RECORD_BYTES(D);
        *(uint32_t *)(packed + scale_offset(D, row % 64)) = quantiser.bits;
    }
}

/* Columns 0 .. 8 step + 7 of L's rows 8 step .. 8 step + 7. */
template <int D>
__device__ __forceinline__ void shaped_fetch(const float *feedback, int step, shaped_shared<D> &shared) {
    for (int i = threadIdx.x; i < 8 * 2 * (step + 1); i += D)
        copy_async(&shared.l[step & 1][i & 7][i >> 3 << 2],
                   feedback + (size_t)(STEP * step + (i & 7)) * D + (i >> 3 << 2));
}

/* The terms of a step's errors, for one panel below them or two. */
template <int D, bool BOTH>
__device__ __forceinline__ void shaped_update(const shaped_shared<D> &shared, int step, int row, int panel_a,
                                              panel_values &a, int panel_b, panel_values &b) {
    const float(*l)[D] = shared.l[step & 1];
#pragma unroll 2
    for (int i = STEP - 1; i >= 0; i--) {
        float error[OWN_ROWS];
        four(error, &shared.x[STEP * step + i][row]);
#pragma unroll
        for (int j = 0; j < PANEL; j += 4) {
            float factor[4];
            four(factor, &l[i][PANEL * panel_a + j]);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int r = 0; r < OWN_ROWS; r++)
                    a[j + k][r] = __fmaf_rn(-factor[k], error[r], a[j + k][r]);
        }
        if (BOTH)
#pragma unroll
            for (int j = 0; j < PANEL; j += 4) {
                float factor[4];
                four(factor, &l[i][PANEL * panel_b + j]);
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int r = 0; r < OWN_ROWS; r++)
                        b[j + k][r] = __fmaf_rn(-factor[k], error[r], b[j + k][r]);
            }
    }
}

__device__ __forceinline__ float one_from(float value, float edge) {
    float one;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(value), "f"(edge)); /* 0 for a NaN, whose code is 0 */
    return one;
}

/* Codes the upper (HALF 1) or lower step of a panel; with feedback each code's error is taken into the panel's lower dims.
 * ret_codes: two bits a dim. */
template <int D, int HALF>
__device__ __forceinline__ void shaped_code(shaped_shared<D> &shared, bool feedback, int panel, int row,
                                            panel_values &t, uint32_t (&ret_codes)[OWN_ROWS]) {
    float edge[3][OWN_ROWS], scale[OWN_ROWS], zero[OWN_ROWS], codes[OWN_ROWS];
#pragma unroll
    for (int e = 0; e < 3; e++)
        four(edge[e], &shared.edge[e][row]);
#pragma unroll
    for (int r = 0; r < OWN_ROWS; r++) {
        scale[r] = __half2float(__ushort_as_half((uint16_t)shared.scale[row + r]));
        zero[r] = __half2float(__ushort_as_half((uint16_t)(shared.scale[row + r] >> 16)));
        codes[r] = 0.0F;
    }
#pragma unroll
    for (int i = STEP - 1; i >= 0; i--) {
        constexpr int BASE = HALF * STEP;
        float(&own)[ROWS] = shared.x[PANEL * panel + BASE + i];
        float x[OWN_ROWS], error[OWN_ROWS];
        four(x, &own[row]);
#pragma unroll
        for (int r = 0; r < OWN_ROWS; r++) {
            float value = t[BASE + i][r];
            float code = one_from(value, edge[0][r]) + one_from(value, edge[1][r]) + one_from(value, edge[2][r]);
            codes[r] = __fmaf_rn(codes[r], 4.0F, code);
            error[r] = __fmaf_rn(code - zero[r], scale[r], -x[r]);
        }
        if (!feedback)
            continue;
        *(float4 *)&own[row] = make_float4(error[0], error[1], error[2], error[3]);
        const float *l = &shared.l[HALF][i][PANEL * panel];
#pragma unroll
        for (int j = 0; j < BASE + i; j += 4) {
            float factor[4];
            four(factor, l + j);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (j + k < BASE + i)
#pragma unroll
                    for (int r = 0; r < OWN_ROWS; r++)
                        t[j + k][r] = __fmaf_rn(-factor[k], error[r], t[j + k][r]);
        }
    }
#pragma unroll
    for (int r = 0; r < OWN_ROWS; r++) /* a whole number below 2^16, put on the last bits of a significand */
        ret_codes[r] = __float_as_uint(codes[r] + 0x1p23F) & 0xFFFFU;
}

/* Four codes, two bits each, as one byte each. */
__device__ __forceinline__ uint32_t spread(uint32_t codes) {
    return (codes | codes << 6 | codes << 12 | codes << 18) & 0x03030303U;
}

/* Step 4: 16 bytes a thread and page. */
template <int D>
__device__ __forceinline__ void shaped_write(const struct cuda_pack_params &params, uint32_t record,
                                             uint32_t first_item, const shaped_shared<D> &shared) {
    constexpr int W = D / 64;
    const uint32_t thread = threadIdx.x;
#pragma unroll
    for (uint32_t page = 0; page < 2; page++) {
        if (first_item + page >= params.items)
            return;
        uint32_t words[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) { /* word [tile][g][t][half][w] */
            uint32_t at = 4 * thread + i;
            uint32_t w = at % W, half = at / W % 2, t = at / (2 * W) % 4, g = at / (8 * W) % 8, tile = at / (64 * W);
            uint32_t row = 64 * page + 16 * tile + 8 * half + g;
            words[i] = 0;
#pragma unroll
            for (uint32_t f = 0; f < 4; f++) {
                uint32_t codes = __float_as_uint(shared.x[CODES_OF(W * f + w)][row]);
                words[i] |= spread(codes >> (8 * t) & 0xFFU) << (2 * f);
            }
        }
        uint8_t *packed = params.packed[first_item + page] + (size_t)record * PACKED_RECORD_BYTES(D);
        ((uint4 *)packed)[thread] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

template <int D> __device__ __forceinline__ void pack_shaped(const struct cuda_pack_params &params) {
    constexpr int PANELS = D / PANEL;
    extern __shared__ uint4 memory[];
    shaped_shared<D> &shared = *(shaped_shared<D> *)memory;
    const uint32_t first_item = blockIdx.x * 2, record = blockIdx.y;
    const struct cuda_head &head = params.calibration.heads[record];
    const float *feedback = head.feedback;
    if (!feedback && !head.centre_static)
        return;
    const int warp = threadIdx.x / 32, row = threadIdx.x % 32 * OWN_ROWS;
    const int panel[2] = {PANELS - 1 - warp, warp};

    shaped_load<D>(params, head, record, first_item, panel, shared);
    if (feedback)
        shaped_fetch<D>(feedback, D / STEP - 1, shared);
    copies_arrive();
    __syncthreads();
    shaped_scales<D>(params, head, record, first_item, shared);
    __syncthreads();

    panel_values next, later; /* the panel that this warp codes next, and the one after it */
#pragma unroll
    for (int j = 0; j < PANEL; j++) {
        four(next[j], &shared.x[PANEL * panel[0] + j][row]);
        four(later[j], &shared.x[PANEL * panel[1] + j][row]);
    }
    bool first = true; /* panel[0] is not coded yet */
    uint32_t upper[OWN_ROWS];
    for (int step = D / STEP - 1; step >= 0; step--) {
        const int from = (step + 1) / 2; /* panel of the errors that are new */
        if (feedback) {
            if (step + 1 < D / STEP) {
                if (first && panel[0] < from)
                    shaped_update<D, true>(shared, step + 1, row, panel[0], next, panel[1], later);
                else if (first)
                    shaped_update<D, false>(shared, step + 1, row, panel[1], later, 0, later);
                else if (panel[1] < from)
                    shaped_update<D, false>(shared, step + 1, row, panel[1], next, 0, next);
            }
            __syncthreads(); /* the errors and the L of step + 1 have been used */
            if (step > 0)
                shaped_fetch<D>(feedback, step - 1, shared);
        }
        const int own = first ? panel[0] : panel[1];
        if (step / 2 == own) {
            uint32_t codes[OWN_ROWS];
            if (step % 2 == 1) {
                shaped_code<D, 1>(shared, feedback != nullptr, own, row, next, upper);
            } else {
                shaped_code<D, 0>(shared, feedback != nullptr, own, row, next, codes);
#pragma unroll
                for (int r = 0; r < OWN_ROWS; r++)
                    ((uint32_t *)shared.x[CODES_OF(own)])[row + r] = codes[r] | upper[r] << 16;
                first = false;
#pragma unroll
                for (int j = 0; j < PANEL; j++)
#pragma unroll
                    for (int r = 0; r < OWN_ROWS; r++)
                        next[j][r] = later[j][r];
            }
        }
        copies_arrive();
        __syncthreads();
    }
    shaped_write<D>(params, record, first_item, shared);
}

#endif
