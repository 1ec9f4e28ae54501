/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Query columns: from a worker's rows to what the matrix unit takes, and results back to a worker's rows.
 *
 * A column is one query row of one query head. One warp rotates it, arranged as in rotate.cuh in chunks of 4 (head size
 * 64: lanes 16 .. 31 hold what lanes 0 .. 15 do). Then it becomes 16-bit fixed point, in units of its greatest magnitude / 32512,
 * split into a high and a low signed byte. A query area in shared memory holds the columns of one segment:
 *
 *   words [columns / 4][head size / 64][lane 4g + t][4]: word b of group i holds elements 64i + 16b + 4t .. + 3 of B's column g.
 *         4 columns: B's column 2c is the high byte of column c, 2c + 1 its low byte. 8 columns: first all high, then all low.
 *   sum, scale, sigma [columns]: four times the sum of the fixed-point elements; what makes a logit to base 2 of four times a
 *         product with them; the logit of the centre's static part
 *   turns [columns][pairs]: {q a', q b'} of the centre's rotating pairs, as logits
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_QUERY_CUH
#define OSCAR_KERNELS_CUDA_DECODE_QUERY_CUH

#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/rotate.cuh"

#define QUERY_UNIT 32512.0F    /* 127 * 256: its high byte stays a signed byte when the low one is rounded */
#define GREATEST_QUERY 1e29F   /* no rotation, centre or logit overflows from there */
#define GREATEST_TURN 60000.0F /* of a pair's logit: FP16 holds it */

template <int D> struct row {
    static constexpr int lanes = D < 128 ? D / 4 : 32;
    static constexpr int chunks = D / (4 * lanes);
    static constexpr int values = 4 * chunks;
    static __device__ __forceinline__ int own(uint32_t lane) { return 4 * static_cast<int>(lane % lanes); }
};

template <int D>
static __device__ __forceinline__ void add_row(float (&o)[row<D>::values], float factor,
                                               const float4 (&from)[row<D>::chunks]) {
#pragma unroll
    for (int chunk = 0; chunk < row<D>::chunks; chunk++) {
        o[4 * chunk] = fmaf(factor, from[chunk].x, o[4 * chunk]);
        o[4 * chunk + 1] = fmaf(factor, from[chunk].y, o[4 * chunk + 1]);
        o[4 * chunk + 2] = fmaf(factor, from[chunk].z, o[4 * chunk + 2]);
        o[4 * chunk + 3] = fmaf(factor, from[chunk].w, o[4 * chunk + 3]);
    }
}

/* Sums of N values over the lanes: lane i gets that of v[i / (32 / N)]. */
template <int N> static __device__ __forceinline__ float sum_over_lanes(float (&v)[N]) {
    const uint32_t lane = rare_lane();
#pragma unroll
    for (int step = 0; step < 5; step++) {
        const int half = 16 >> step, left = half * N / 32; /* values, after this step */
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            if (i < left) {
                float mine = upper ? v[i + left] : v[i], other = upper ? v[i] : v[i + left];
                v[i] = mine + __shfl_xor_sync(WARP_LANES, other, half);
            }
        if (left == 0)
            v[0] += __shfl_xor_sync(WARP_LANES, v[0], half);
    }
    return v[0];
}

/* x R */
template <int D> static __device__ __forceinline__ void rotate_matrix(const float *matrix, float (&x)[row<D>::values]) {
    const float *own = matrix + row<D>::own(rare_lane());
    float y[row<D>::values] = {};
#pragma unroll
    for (int chunk = 0; chunk < row<D>::chunks; chunk++)
#pragma unroll 4
        for (int lane = 0; lane < row<D>::lanes; lane++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float element = __shfl_sync(WARP_LANES, x[4 * chunk + k], lane);
                const float *line = own + (128 * chunk + 4 * lane + k) * D;
#pragma unroll
                for (int to = 0; to < row<D>::chunks; to++) {
                    float4 r = __ldg(reinterpret_cast<const float4 *>(line + 128 * to));
                    y[4 * to] = fmaf(element, r.x, y[4 * to]);
                    y[4 * to + 1] = fmaf(element, r.y, y[4 * to + 1]);
                    y[4 * to + 2] = fmaf(element, r.z, y[4 * to + 2]);
                    y[4 * to + 3] = fmaf(element, r.w, y[4 * to + 3]);
                }
            }
#pragma unroll
    for (int i = 0; i < row<D>::values; i++)
        x[i] = y[i];
}

/* The lane's share of the product of x with a row of floats, whose part that is the lane's begins at `own`. */
template <int D> static __device__ __forceinline__ float product(const float (&x)[row<D>::values], const float *own) {
    float sum = 0.0F;
#pragma unroll
    for (int chunk = 0; chunk < row<D>::chunks; chunk++) {
        float4 r = __ldg(reinterpret_cast<const float4 *>(own + 128 * chunk));
        sum = fmaf(x[4 * chunk], r.x, sum);
        sum = fmaf(x[4 * chunk + 1], r.y, sum);
        sum = fmaf(x[4 * chunk + 2], r.z, sum);
        sum = fmaf(x[4 * chunk + 3], r.w, sum);
    }
    return D >= 128 || rare_lane() < row<D>::lanes ? sum : 0.0F;
}

static __device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
    for (int h = 16; h > 0; h /= 2)
        x += __shfl_xor_sync(WARP_LANES, x, h);
    return x;
}

/* Element first + lane of x Rᵀ. */
template <int D>
static __device__ __forceinline__ float rotate_back(const float *matrix, const float (&x)[row<D>::values], int first) {
    const float *own = matrix + row<D>::own(rare_lane()) + first * D;
    float v[32];
#pragma unroll
    for (int i = 0; i < 32; i++)
        v[i] = product<D>(x, own + i * D);
    return sum_over_lanes(v);
}

static __device__ __forceinline__ uint64_t element_address(uint64_t base, int64_t index) {
    return base + static_cast<uint64_t>(index) * sizeof(uint16_t);
}

/* --- in --- */

template <int D, int C, int P> struct query_area {
    static constexpr int groups = C / 4; /* of words, and columns that a lane works for */
    static constexpr int sums = 2 * C * D, scales = sums + 4 * C, sigmas = scales + 4 * C, turns = sigmas + 4 * C;
    static __device__ __forceinline__ int word(int group, int block, int lane) {
        return 4 * (((group * (D / 64) + block / 4) * 32 + lane) * 4 + block % 4);
    }
};

/* Four elements as fixed point; returns the high bytes, and the low ones and the sum by reference. */
static __device__ __forceinline__ uint32_t fix(const float *x, float units, uint32_t &low, int &sum) {
    uint32_t high = 0;
    low = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int fixed = __float2int_rn(x[k] * units), byte = static_cast<int8_t>(fixed);
        sum += fixed;
        high |= (static_cast<uint32_t>((fixed - byte) >> 8) & 0xFF) << (8 * k);
        low |= (static_cast<uint32_t>(byte) & 0xFF) << (8 * k);
    }
    return high;
}

/* A column as fixed point, the words as the lane has the row; and what the centre makes of it: lane 2i has pair i's cosine part,
 * lane 2i + 1 its sine part. */
template <int D> struct column {
    uint32_t high[row<D>::chunks], low[row<D>::chunks];
    float sum, scale, sigma, turn;
};

/* A part of a pair's logit; `other` is the other part. */
static __device__ __forceinline__ float turn_within(float turn, float other) {
    const float length = sqrtf(fmaf(turn, turn, other * other));
    return length > GREATEST_TURN ? turn * (GREATEST_TURN / length) : turn;
}

/* What the centre makes of a column that a warp makes alone. */
template <int D, int P>
static __device__ __forceinline__ void column_centre(const struct cuda_decode_params &params,
                                                     const struct cuda_head &head, const float (&x)[row<D>::values],
                                                     column<D> &column) {
    const int own = row<D>::own(rare_lane());
    if (head.centre_static)
        column.sigma = sum_over_warp(product<D>(x, head.centre_static + own)) * params.scale;
    if constexpr (P > 0) {
        float v[32] = {};
#pragma unroll
        for (int i = 0; i < P; i++)
            if (i < head.pairs) {
                v[2 * i] = product<D>(x, head.centre_cos + own + i * D);
                v[2 * i + 1] = product<D>(x, head.centre_sin + own + i * D);
            }
        const float turn = sum_over_lanes(v) * params.scale;
        column.turn = turn_within(turn, __shfl_xor_sync(WARP_LANES, turn, 1));
    }
}

/* A column's elements as the worker has them; those of one that no query stands for are zero. */
template <int D> struct raw_column { uint16_t element[row<D>::values]; };

/* The column that begins at an element of q; one that a query stands for, or else one that may be read. */
template <int D>
static __device__ __forceinline__ raw_column<D> column_load(const struct cuda_decode_params &params, int64_t first,
                                                            bool there) {
    const uint16_t *own =
        reinterpret_cast<const uint16_t *>(element_address(params.q, first + row<D>::own(rare_lane())));
    raw_column<D> raw;
#pragma unroll
    for (int i = 0; i < row<D>::values; i++) {
        const uint16_t element = __ldg(own + i / 4 * 128 + i % 4);
        raw.element[i] = there ? element : 0;
    }
    return raw;
}

/* Column c of segment (item, block) of KV head `kv_head`. */
template <int D, int C>
static __device__ __forceinline__ raw_column<D> column_read(const struct cuda_decode_params &params, uint32_t kv_head,
                                                            uint32_t item_index, uint32_t block, int c) {
    const struct cuda_batch_item &item = params.batch.items[item_index];
    uint32_t query = block * C + c;
    if (query >= item.rows * params.group)
        return raw_column<D>{};
    return column_load<D>(params,
                          item.q_offset + (query / params.group) * item.q_row_stride +
                              (kv_head * params.group + query % params.group) * item.q_head_stride,
                          true);
}

/* Where column c of a segment that the plan has prepared begins in q; where no query stands for it, what is there may be read. */
static __device__ __forceinline__ int64_t column_first(const struct cuda_decode_params &params, uint32_t kv_head,
                                                       const struct cuda_decode_query &query, uint32_t c) {
    return query.column[c] + kv_head * params.group * query.head_stride;
}

/* Where the warps of a block leave what each made of a column's rotation by a matrix: in slots of the warp that makes the
 * column, which are not filled yet. */
template <int D> struct rotation_parts {
    static constexpr uint32_t a_slot = 8;
    static_assert(a_slot * 4 * D <= CUDA_DECODE_SLOT_BYTES(D) && CUDA_DECODE_MAX_WARPS <= 2 * a_slot,
                  "two slots hold all");
    uint32_t slots, first, count;
    __device__ __forceinline__ uint32_t part(uint32_t i) const {
        return slots + (first + i) / a_slot * CUDA_DECODE_SLOT_PITCH(D) + (first + i) % a_slot * (4 * D) +
               4 * row<D>::own(rare_lane());
    }
};

static __device__ __forceinline__ float query_float(uint16_t element, uint32_t fp16) {
    return fminf(fmaxf(worker_float(element, fp16), -GREATEST_QUERY), GREATEST_QUERY);
}

/* A warp's share of the rotations of a query's columns: its rows of the matrix, each read once for all of them. parts(c) tells where
 * those of column c are left. */
template <int D, int C, typename Parts>
static __device__ __forceinline__ void rotate_share(const struct cuda_decode_params &params, uint32_t kv_head,
                                                    const struct cuda_decode_query &query, uint32_t warp,
                                                    uint32_t warps, Parts parts) {
    constexpr uint32_t ahead = C == 4 && D <= 128 ? 8 : 4; /* rows on their way together */
    const float *matrix = params.heads[kv_head].rotation_k + row<D>::own(rare_lane());
    const uint16_t *q[C];
#pragma unroll
    for (uint32_t c = 0; c < C; c++)
        q[c] = reinterpret_cast<const uint16_t *>(element_address(params.q, column_first(params, kv_head, query, c)));
    float y[C][row<D>::values] = {};
#pragma unroll 1
    for (uint32_t first = warp; first < D; first += ahead * warps) {
        float4 rows[ahead][row<D>::chunks];
        uint16_t elements[ahead][C];
#pragma unroll
        for (uint32_t i = 0; i < ahead; i++) {
            const uint32_t from = min(first + i * warps, D - 1);
#pragma unroll
            for (int chunk = 0; chunk < row<D>::chunks; chunk++)
                rows[i][chunk] = __ldg(reinterpret_cast<const float4 *>(matrix + from * D + 128 * chunk));
#pragma unroll
            for (uint32_t c = 0; c < C; c++)
                elements[i][c] = __ldg(q[c] + from);
        }
#pragma unroll
        for (uint32_t i = 0; i < ahead; i++)
#pragma unroll
            for (uint32_t c = 0; c < C; c++) {
                const bool there = c < query.columns && first + i * warps < D;
                add_row<D>(y[c], there ? query_float(elements[i][c], params.fp16) : 0.0F, rows[i]);
            }
    }
    if (rare_lane() < row<D>::lanes)
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int i = 0; i < row<D>::values; i++)
                store_shared(parts(c).part(warp) + 512 * (i / 4) + 4 * (i % 4), y[c][i]);
}

/* A raw column as floats. */
template <int D>
static __device__ __forceinline__ void column_floats(const struct cuda_decode_params &params, const raw_column<D> &raw,
                                                     float (&x)[row<D>::values]) {
#pragma unroll
    for (int i = 0; i < row<D>::values; i++)
        x[i] = query_float(raw.element[i], params.fp16);
}

/* The sum of the parts that the warps of a block made of a rotation by a matrix. */
template <int D>
static __device__ __forceinline__ void column_gather(const rotation_parts<D> &parts, float (&x)[row<D>::values]) {
#pragma unroll
    for (int i = 0; i < row<D>::values; i++)
        x[i] = 0.0F;
#pragma unroll 4
    for (uint32_t part = 0; part < parts.count; part++) {
        float4 share[row<D>::chunks];
#pragma unroll
        for (int chunk = 0; chunk < row<D>::chunks; chunk++)
            share[chunk] = load_shared_floats(parts.part(part) + 512 * chunk);
        add_row<D>(x, 1.0F, share);
    }
}

/* Fixed point of a rotated column; what the centre adds is left out. */
template <int D>
static __device__ __forceinline__ column<D> column_fix(const struct cuda_decode_params &params,
                                                       const float (&x)[row<D>::values]) {
    column<D> column;
    float greatest = 0.0F;
#pragma unroll
    for (int i = 0; i < row<D>::values; i++)
        greatest = fmaxf(greatest, fabsf(x[i]));
    greatest = __uint_as_float(__reduce_max_sync(WARP_LANES, __float_as_uint(greatest)));
    float units = greatest > 0.0F ? QUERY_UNIT / greatest : 0.0F;
    int sum = 0;
#pragma unroll
    for (int chunk = 0; chunk < row<D>::chunks; chunk++)
        column.high[chunk] = fix(&x[4 * chunk], units, column.low[chunk], sum);
    column.sum =
        4.0F * static_cast<float>(__reduce_add_sync(WARP_LANES, D >= 128 || rare_lane() < row<D>::lanes ? sum : 0));
    column.scale = greatest * (0.25F / QUERY_UNIT) * params.scale;
    column.sigma = column.turn = 0.0F;
    return column;
}

/* All of a column, by one warp alone. Not inlined: its registers are none of the loop's over the units. */
template <int D, int P>
static __device__ __noinline__ column<D> column_make(const struct cuda_decode_params &params, uint32_t kv_head,
                                                     raw_column<D> raw) {
    const struct cuda_head &head = params.heads[kv_head];
    float x[row<D>::values];
    column_floats<D>(params, raw, x);
    if (head.rotation_k)
        rotate_matrix<D>(head.rotation_k, x);
    else
        rotate_hadamard<D, row<D>::lanes, 4>(x, rare_lane());
    column<D> column = column_fix<D>(params, x);
    column_centre<D, P>(params, head, x, column);
    return column;
}

/* Writes column c to its segment's area. */
template <int D, int C, int P>
static __device__ __forceinline__ void column_write(const column<D> &column, uint32_t area, int c) {
    using shape = query_area<D, C, P>;
    const uint32_t lane = rare_lane(), t = lane & 3;
    if (lane < row<D>::lanes)
#pragma unroll
        for (int chunk = 0; chunk < row<D>::chunks; chunk++) {
            int block = 8 * chunk + row<D>::own(lane) / 16;
            store_shared(area + shape::word(0, block, 4 * (C == 4 ? 2 * c : c) + t), column.high[chunk]);
            store_shared(area + shape::word(C / 8, block, 4 * (C == 4 ? 2 * c + 1 : c) + t), column.low[chunk]);
        }
    if (lane == 0) {
        store_shared(area + shape::sums + 4 * c, column.sum);
        store_shared(area + shape::scales + 4 * c, column.scale);
        store_shared(area + shape::sigmas + 4 * c, column.sigma);
    }
    if (P > 0 && lane < 2 * P)
        store_shared(area + shape::turns + 8 * P * c + 4 * lane, column.turn);
}

/* Leaves a column in shared memory for warps that go on with it. */
template <int D>
static __device__ __forceinline__ void column_leave(const float (&x)[row<D>::values], uint32_t rotated) {
    if (rare_lane() < row<D>::lanes)
#pragma unroll
        for (int i = 0; i < row<D>::values; i++)
            store_shared(rotated + 4 * row<D>::own(rare_lane()) + 512 * (i / 4) + 4 * (i % 4), x[i]);
}

/* What the centre adds to the columns of a query is worked out by all warps of a block: work `i` of a head is its static part (0) or
 * pair i - 1. A lane's share of what it multiplies the columns with: */
template <int D> struct centre_rows { float4 of[2][row<D>::chunks]; /* cosine and sine; the static part twice */ };

template <int D>
static __device__ __forceinline__ centre_rows<D> centre_read(const struct cuda_head &head, uint32_t i) {
    const int own = row<D>::own(rare_lane());
    const float *from[2] = {i == 0 ? head.centre_static : head.centre_cos + (i - 1) * D,
                            i == 0 ? head.centre_static : head.centre_sin + (i - 1) * D};
    centre_rows<D> rows;
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll
        for (int chunk = 0; chunk < row<D>::chunks; chunk++)
            rows.of[part][chunk] = __ldg(reinterpret_cast<const float4 *>(from[part] + own + 128 * chunk));
    return rows;
}

/* Work i of a segment's columns, which lie rotated at `rotated`, as floats [C][D]: into its area. */
template <int D, int C, int P>
static __device__ __forceinline__ void centre_share(const struct cuda_decode_params &params, const centre_rows<D> &rows,
                                                    uint32_t i, uint32_t rotated, uint32_t area) {
    using shape = query_area<D, C, P>;
    constexpr int lanes = 32 / (2 * C); /* that have one sum */
    const uint32_t lane = rare_lane();
    float v[2 * C] = {};
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
        for (int chunk = 0; chunk < row<D>::chunks; chunk++) {
            const float4 x = load_shared_floats(rotated + 4 * (c * D + row<D>::own(lane) + 128 * chunk));
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const float4 r = rows.of[part][chunk];
                v[2 * c + part] = fmaf(x.x, r.x, fmaf(x.y, r.y, fmaf(x.z, r.z, fmaf(x.w, r.w, v[2 * c + part]))));
            }
        }
    if (lane >= row<D>::lanes)
#pragma unroll
        for (int c = 0; c < 2 * C; c++)
            v[c] = 0.0F;
    const float sum = sum_over_lanes(v) * params.scale, other = __shfl_xor_sync(WARP_LANES, sum, lanes);
    const uint32_t c = lane / lanes / 2, part = lane / lanes % 2;
    if (lane % lanes == 0 && i > 0)
        store_shared(area + shape::turns + 8 * (P * c + i - 1) + 4 * part, turn_within(sum, other));
    else if (lane % lanes == 0 && part == 0)
        store_shared(area + shape::sigmas + 4 * c, sum);
}

/* --- out --- */

/* Where a column's result belongs. Looked up before it is there: the way is long. */
struct result_place {
    bool there;        /* a query stands for the column */
    uint64_t out, lse; /* addresses */
    const float *rotation_v;
};

static __device__ __forceinline__ struct result_place
result_place_of(const struct cuda_decode_params &params, uint32_t kv_head, uint32_t item_index, uint32_t column) {
    const struct cuda_batch_item &item = params.batch.items[item_index];
    uint32_t query_row = column / params.group, query_head = kv_head * params.group + column % params.group;
    return {column < item.rows * params.group,
            element_address(params.out,
                            item.out_offset + query_row * item.out_row_stride + query_head * item.out_head_stride),
            params.lse +
                sizeof(float) *
                    (item.lse_offset + static_cast<uint64_t>(query_row) * params.kv_heads * params.group + query_head),
            params.heads[kv_head].rotation_v};
}

/* Makes a result of o and l, relative to 2^m, but for its rotation; writes its log-sum-exp. */
template <int D>
static __device__ __forceinline__ void column_divide(const struct cuda_decode_params &params,
                                                     const struct result_place &place, float (&o)[row<D>::values],
                                                     float m, float l) {
    const float inverse = l > 0.0F ? 1.0F / l : 0.0F;
#pragma unroll
    for (int i = 0; i < row<D>::values; i++)
        o[i] *= inverse;
    if (rare_lane() == 0 && params.has_lse)
        *reinterpret_cast<float *>(place.lse) =
            l > 0.0F ? (m + log2f(l)) * 0.6931471805599453F : __int_as_float(0xFF800000);
}

/* Writes elements first .. first + 31 of a result that a matrix rotates back. */
template <int D>
static __device__ __forceinline__ void write_rotated(const struct cuda_decode_params &params, uint64_t to,
                                                     const float *matrix, const float (&o)[row<D>::values], int first) {
    const float value = rotate_back<D>(matrix, o, first);
    reinterpret_cast<uint16_t *>(to)[first + rare_lane()] =
        static_cast<uint16_t>(worker_pair(value, 0.0F, params.fp16));
}

/* Writes a column's result. */
template <int D>
static __device__ __forceinline__ void finish_column(const struct cuda_decode_params &params,
                                                     const struct result_place &place, float (&o)[row<D>::values],
                                                     float m, float l) {
    if (!place.there)
        return;
    const uint64_t to = place.out;
    const uint32_t lane = rare_lane();
    column_divide<D>(params, place, o, m, l);
    if (place.rotation_v) {
        for (int first = 0; first < D; first += 32)
            write_rotated<D>(params, to, place.rotation_v, o, first);
        return;
    }
    rotate_hadamard<D, row<D>::lanes, 4>(o, lane);
    if (lane < row<D>::lanes)
#pragma unroll
        for (int chunk = 0; chunk < row<D>::chunks; chunk++) {
            uint64_t at = to + sizeof(uint16_t) * (row<D>::own(lane) + 128 * chunk);
            uint2 words = make_uint2(worker_pair(o[4 * chunk], o[4 * chunk + 1], params.fp16),
                                     worker_pair(o[4 * chunk + 2], o[4 * chunk + 3], params.fp16));
            if (to % sizeof(words) == 0) {
                *reinterpret_cast<uint2 *>(at) = words;
            } else {
                uint16_t *element = reinterpret_cast<uint16_t *>(at);
                element[0] = static_cast<uint16_t>(words.x);
                element[1] = static_cast<uint16_t>(words.x >> 16);
                element[2] = static_cast<uint16_t>(words.y);
                element[3] = static_cast<uint16_t>(words.y >> 16);
            }
        }
}

#endif
