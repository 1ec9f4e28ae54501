/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tile's queries and outputs: between the worker's tensors and a row of shared memory for each column, rotated on the way. The
 * block works on rows here, 8 lanes on one.
 */
#ifndef OSCAR_KERNELS_CUDA_PREFILL_QUERY_CUH
#define OSCAR_KERNELS_CUDA_PREFILL_QUERY_CUH

#include "kernels/cuda/prefill_tile.cuh"

/* All rows of the tile times R, or its transpose, in place, by the whole block. */
template <int D, bool BACK>
static __device__ void rotate_rows(struct shared<D> &mem, const float *__restrict__ matrix) {
    constexpr int dims = D == 256 ? 2 : 1; /* of a thread */
    constexpr int step = 8;                /* rows at a time */
    constexpr int lanes = D / dims;
    int j = threadIdx.x % lanes;
    for (int first = threadIdx.x / lanes * step; first < COLUMNS; first += THREADS / lanes * step) {
        float sum[dims][step] = {};
        for (int i = 0; i < D; i += 4) {
            float4 r[dims];
#pragma unroll
            for (int n = 0; n < dims; n++) {
                int at = j + n * lanes;
                if (BACK)
                    r[n] = *reinterpret_cast<const float4 *>(matrix + at * D + i);
                else
                    r[n] = make_float4(matrix[i * D + at], matrix[(i + 1) * D + at], matrix[(i + 2) * D + at],
                                       matrix[(i + 3) * D + at]);
            }
#pragma unroll
            for (int row = 0; row < step; row++) {
                float4 x = *reinterpret_cast<const float4 *>(&mem.rows[first + row][i]);
#pragma unroll
                for (int n = 0; n < dims; n++) {
                    sum[n][row] = fmaf(x.x, r[n].x, sum[n][row]);
                    sum[n][row] = fmaf(x.y, r[n].y, sum[n][row]);
                    sum[n][row] = fmaf(x.z, r[n].z, sum[n][row]);
                    sum[n][row] = fmaf(x.w, r[n].w, sum[n][row]);
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int row = 0; row < step; row++)
#pragma unroll
            for (int n = 0; n < dims; n++)
                mem.rows[first + row][j + n * lanes] = sum[n][row];
        __syncthreads();
    }
}

/* A row over 8 lanes, in the arrangement of rotate.cuh. */
template <int D> static __device__ __forceinline__ void read_row(float (&x)[D / ROW_LANES], const float *row) {
#pragma unroll
    for (int i = 0; i < D / ROW_LANES; i += 4) {
        float4 four =
            *reinterpret_cast<const float4 *>(row + i / 8 * 8 * ROW_LANES + threadIdx.x % ROW_LANES * 8 + i % 8);
        x[i] = four.x;
        x[i + 1] = four.y;
        x[i + 2] = four.z;
        x[i + 3] = four.w;
    }
}

template <int D> static __device__ __forceinline__ void write_row(float *row, const float (&x)[D / ROW_LANES]) {
#pragma unroll
    for (int i = 0; i < D / ROW_LANES; i += 4)
        *reinterpret_cast<float4 *>(row + i / 8 * 8 * ROW_LANES + threadIdx.x % ROW_LANES * 8 + i % 8) =
            make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

/* Elements of a worker's row: their alignment is the worker's affair. */
template <int D>
static __device__ __forceinline__ void read_worker_row(float (&x)[D / ROW_LANES], const uint16_t *row, bool bf16) {
#pragma unroll
    for (int i = 0; i < D / ROW_LANES; i++) {
        float value = worker_float(row[i / 8 * 8 * ROW_LANES + threadIdx.x % ROW_LANES * 8 + i % 8], !bf16);
        x[i] = fminf(fmaxf(value, -MAX_QUERY), MAX_QUERY);
    }
}

template <int D>
static __device__ __forceinline__ void write_worker_row(uint16_t *row, const float (&x)[D / ROW_LANES], bool bf16) {
#pragma unroll
    for (int i = 0; i < D / ROW_LANES; i++)
        row[i / 8 * 8 * ROW_LANES + threadIdx.x % ROW_LANES * 8 + i % 8] =
            static_cast<uint16_t>(worker_pair(x[i], 0, !bf16));
}

template <int D>
static __device__ __forceinline__ float dot(const float (&x)[D / ROW_LANES], const float *__restrict__ with) {
    float y[D / ROW_LANES], sum = 0;
    read_row<D>(y, with);
#pragma unroll
    for (int i = 0; i < D / ROW_LANES; i++)
        sum = fmaf(x[i], y[i], sum);
    return lanes_sum<ROW_LANES>(sum);
}

/* A column's rotated query to its unit, its two FP16 terms and what the centre makes of it. */
template <int D>
static __device__ void prepare_query(const struct cuda_prefill_params &params, const struct cuda_head &head,
                                     struct shared<D> &mem, uint32_t column) {
    float x[D / ROW_LANES], largest = 0;
    uint32_t lane = threadIdx.x % ROW_LANES;
    read_row<D>(x, mem.rows[column]);
#pragma unroll
    for (int i = 0; i < D / ROW_LANES; i++) {
        x[i] *= params.log2_scale;
        largest = fmaxf(largest, fabsf(x[i]));
    }
    largest = lanes_max<ROW_LANES>(largest);
    float sigma = head.centre_static ? dot<D>(x, head.centre_static) : 0;
    for (uint32_t i = 0; i < head.pairs; i++) {
        float alpha = dot<D>(x, head.centre_cos + i * D), beta = dot<D>(x, head.centre_sin + i * D);
        largest = fmaxf(largest, fabsf(alpha) + fabsf(beta));
        if (lane == 0)
            mem.turn[column][i] = make_float2(alpha, beta);
    }
    /* A query below the smallest normal number is as good as zero. */
    int exponent = exponent_above(largest, -100) - UNIT_EXPONENT;
    float inverse = power_of_2(-exponent), sum = 0;
    __syncwarp(); /* the terms take the place of the row that the other lanes have read, the pairs are written */
    for (uint32_t i = lane; i < CUDA_MAX_PAIRS; i += ROW_LANES) {
        float2 turn = mem.turn[column][i];
        mem.turn[column][i] = i < head.pairs ? make_float2(turn.x * inverse, turn.y * inverse) : make_float2(0, 0);
    }
    __half *upper = reinterpret_cast<__half *>(mem.rows[column]), *lower = upper + D;
#pragma unroll
    for (int c = 0; c < D / ROW_LANES; c += 8) {
        int first = c * ROW_LANES + static_cast<int>(lane) * 8, step = first / 16;
        int place = step / shape<D>::words; /* of the dims' codes in their bytes */
        float down = inverse * power_of_2(-2 * place), up = power_of_2(2 * place);
        __half term[2][8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float scaled = x[c + i] * down;
            term[0][i] = __float2half_rn(scaled);
            term[1][i] = __float2half_rn(scaled - __half2float(term[0][i]));
            sum = fmaf(__half2float(term[0][i]) + __half2float(term[1][i]), up, sum);
        }
        /* Dims 4t .. 4t + 3 of a step, which a lane's word of K holds, are the instruction's k = 2t, 2t + 1, 2t + 8, 2t + 9. */
        int to = 16 * step + first % 16 / 2;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                upper[to + 8 * half + i] = term[0][i / 2 * 4 + 2 * half + i % 2];
                lower[to + 8 * half + i] = term[1][i / 2 * 4 + 2 * half + i % 2];
            }
    }
    sum = lanes_sum<ROW_LANES>(sum);
    if (lane == 0) {
        mem.unit[column] = power_of_2(exponent);
        mem.sigma[column] = sigma * inverse;
        mem.sum[column] = sum * CODE_UNIT;
    }
}

/* All columns of the tile; those behind the last one are zeros. */
template <int D>
static __device__ void prepare_queries(const struct cuda_prefill_params &params, const struct cuda_head &head,
                                       struct shared<D> &mem, const struct tile &tile) {
    const struct cuda_batch_item &item = *tile.item;
    for (uint32_t i = threadIdx.x / ROW_LANES; i < COLUMNS; i += THREADS / ROW_LANES) {
        uint32_t column = tile.first_column + i, row = column / params.group;
        uint32_t query_head = tile.kv_head * params.group + column % params.group;
        float x[D / ROW_LANES] = {};
        if (row < item.rows)
            read_worker_row<D>(x, params.q + item.q_offset + row * item.q_row_stride + query_head * item.q_head_stride,
                               params.bf16);
        if (!head.rotation_k)
            rotate_hadamard<D, ROW_LANES>(x);
        write_row<D>(mem.rows[i], x);
    }
    for (uint32_t i = threadIdx.x; i < TOKENS * CUDA_MAX_PAIRS; i += THREADS) {
        uint32_t token = i / CUDA_MAX_PAIRS, pair = i % CUDA_MAX_PAIRS;
        float2 turn = make_float2(0, 0);
        if (pair < head.pairs) {
            const float *from = params.row_turn + (token * params.frequencies + head.centre_pair[pair]) * 2;
            turn = make_float2(from[0], from[1]);
        }
        mem.row_turn[token][pair] = __floats2half2_rn(turn.x, turn.y);
        if (token == 0)
            mem.frequency[pair] = pair < head.pairs ? head.centre_pair[pair] : 0;
    }
    __syncthreads();
    if (head.rotation_k)
        rotate_rows<D, false>(mem, head.rotation_k);
    for (uint32_t i = threadIdx.x / ROW_LANES; i < COLUMNS; i += THREADS / ROW_LANES)
        prepare_query<D>(params, head, mem, i);
    __syncthreads();
}

template <int D>
static __device__ void write_outputs(const struct cuda_prefill_params &params, const struct cuda_head &head,
                                     struct shared<D> &mem, const struct tile &tile, const struct partial<D> &partial) {
    const struct cuda_batch_item &item = *tile.item;
    uint32_t lane = threadIdx.x % 32, warp_column = threadIdx.x / 32 * WARP_COLUMNS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t i = warp_column + lane / 4 + 8 * half, column = tile.first_column + i, row = column / params.group;
        float sum = lanes_sum<4>(partial.sum[half]), inverse = sum > 0 ? 1 / sum : 0;
        __syncwarp(); /* the warp has read the last of its queries */
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            *reinterpret_cast<float2 *>(&mem.rows[i][8 * j + lane % 4 * 2]) =
                make_float2(partial.out[j][2 * half] * inverse, partial.out[j][2 * half + 1] * inverse);
        if (params.lse && lane % 4 == 0 && row < item.rows)
            params.lse[item.lse_offset + static_cast<int64_t>(row) * params.group * params.kv_heads +
                       tile.kv_head * params.group + column % params.group] =
                sum > 0 ? (partial.max[half] + log2f(sum)) * LN_2 : -INFINITY;
    }
    __syncthreads();
    if (head.rotation_v)
        rotate_rows<D, true>(mem, head.rotation_v);
    for (uint32_t i = threadIdx.x / ROW_LANES; i < COLUMNS; i += THREADS / ROW_LANES) {
        uint32_t column = tile.first_column + i, row = column / params.group;
        uint32_t query_head = tile.kv_head * params.group + column % params.group;
        float x[D / ROW_LANES];
        read_row<D>(x, mem.rows[i]);
        if (!head.rotation_v)
            rotate_hadamard<D, ROW_LANES>(x);
        if (row < item.rows)
            write_worker_row<D>(params.out + item.out_offset + row * item.out_row_stride +
                                    query_head * item.out_head_stride,
                                x, params.bf16);
    }
}

#endif
