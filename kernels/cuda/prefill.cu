/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention with many query rows.
 *
 * A block takes one tile: up to 64 columns (a column is a query row of one query head of a KV head's group) of one item against
 * all pages that they see, first the packed ones, then the dense ones. A warp has 16 columns, 4 lanes one: lane 4g + t has
 * columns g and g + 8. Blocks walk over the tiles of all items; nothing is shared between blocks and nothing is left in memory
 * but results.
 *
 * Matrix instructions are m16n8k16 with 16 columns as rows.
 *   Scores: the rotated query is scaled to a common power of two (the column's unit) and split into two FP16 terms, so that it
 *     carries 22 bits. K is a B operand whose codes come out of the page's own byte order with one mask each: the FP16 number
 *     code * 4^f * 2^-24 (f = dim / 16 / (D / 64) is the code's place in its byte), exact. The 4^f is taken out of the query.
 *   Centre: one more product, of (C, S) of each column and pair against the table of a page's rows.
 *   Values: p * scale, relative to the page's largest scale, is two FP16 terms too; V's codes are B operands as K's are. The sum
 *     of p * scale * zero is a column of the same product, so that both see the same rounding; it is where the accumulators
 *     begin. They are taken over into the output after every page: a matrix unit's own sums lose bits.
 *   Dense pages are brought to the same form: rows of FP16 with a power of two as scale, zero 0.
 */
#include "oscar/geometry.h"

#include "kernels/cuda/prefill_params.h"
#include "kernels/cuda/rotate.cuh"

#define TOKENS 64       /* of a page */
#define COLUMNS 64      /* of a tile */
#define THREADS 128     /* of a block */
#define WARP_COLUMNS 16 /* of a warp */
#define STAGES 4        /* packed records in shared memory or on their way there */
#define ROW_LANES 8     /* that share a row outside the matrix instructions, as in rotate.cuh */
#define WARP 0xFFFFFFFFU

/* Finite queries stay finite, as on the host: no rotation, centre or logit of rows in range overflows from here. */
#define MAX_QUERY 1e29F
#define UNIT_EXPONENT 14   /* a column's largest query element or centre term lies below 2^14 of its unit */
#define CODE_UNIT 0x1p-24F /* of a code in the lowest bits of an FP16 number */
#define LN_2 0.6931471805599453F

static_assert(TOKENS == OSCAR_PAGE_TOKENS && COLUMNS == CUDA_PREFILL_COLUMNS && THREADS == CUDA_PREFILL_THREADS, "");

template <int D> struct shape {
    static constexpr int words = D / 64;      /* of K of one token, and of V of one half of a tile, in a lane */
    static constexpr int row_floats = D + 4;  /* a column's row in shared memory */
    static constexpr int code_bytes = 16 * D; /* of a side */
    static constexpr int record_bytes = 2 * code_bytes + 512;
    static constexpr int dense_bytes = 4 * TOKENS * D;
    static constexpr int k_stride = 2 * D + 32, v_stride = 2 * D + 16; /* of a dense row in shared memory */
};

template <int D> struct __align__(16) shared {
    /* A column's row: q as fp32, then its upper and lower FP16 terms, then its output as fp32. */
    float rows[COLUMNS][shape<D>::row_floats];
    union {
        uint8_t record[STAGES][shape<D>::record_bytes];
        struct {
            uint8_t k[TOKENS][shape<D>::k_stride];
            uint8_t v[TOKENS][shape<D>::v_stride];
        } dense;
    };
    /* By page parity: of each token K's scale and zero, V's scale relative to the page's unit, V's zero. */
    float2 k_scale[2][TOKENS];
    float v_scale[2][TOKENS];
    __half v_zero[2][TOKENS];
    /* A column's alpha and beta, and cos and sin of a page's rows, of each pair. */
    float2 turn[COLUMNS][CUDA_MAX_PAIRS + 4];
    __half2 row_turn[TOKENS][CUDA_MAX_PAIRS + 4];
    float unit[COLUMNS], sigma[COLUMNS], sum[COLUMNS];
    float v_unit[2];
    uint32_t index[STAGES];
    uint32_t frequency[CUDA_MAX_PAIRS];
    uint32_t scan[THREADS / 32];
    uint32_t found[2];
};

/* What a lane knows of its two columns. */
struct columns {
    float unit[2], sigma[2], sum[2];
    uint32_t visible[2];  /* positions below it are seen */
    uint32_t least, most; /* visible to all columns of the warp, to one of them */
    uint32_t pairs;
};

template <int D> struct partial {
    float out[D / 8][4];  /* dims 8j + 2t, 8j + 2t + 1 of column g, then of column g + 8 */
    float max[2], sum[2]; /* sum: of the lane's own tokens */
};

static __device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

static __device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void load_matrices_turned(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void copy_16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

static __device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LATER> static __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

static __device__ __forceinline__ float exp_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float power_of_2(int exponent) { return __int_as_float((exponent + 127) << 23); }

/* The smallest e with x < 2^e, of a finite x > 0; never below `least`. */
static __device__ __forceinline__ int exponent_above(float x, int least) {
    return max((__float_as_int(x) >> 23) - 126, least);
}

template <int LANES> static __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int h = 1; h < LANES; h *= 2)
        x += __shfl_xor_sync(WARP, x, h);
    return x;
}

template <int LANES> static __device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
    for (int h = 1; h < LANES; h *= 2)
        x = fmaxf(x, __shfl_xor_sync(WARP, x, h));
    return x;
}

/* --- work ------------------------------------------------------------------------------------------------------------------- */

struct tile {
    const struct cuda_batch_item *item;
    uint32_t kv_head, first_column;
};

static __device__ uint32_t tiles_of(const struct cuda_prefill_params &params, uint32_t i) {
    if (i >= params.batch.header->items || params.batch.items[i].rows <= CUDA_MAX_DECODE_ROWS)
        return 0;
    return (params.batch.items[i].rows * params.group + COLUMNS - 1) / COLUMNS * params.kv_heads;
}

/* Where a block's walk over the tiles of all items stands: at a window of as many items as it has threads. */
struct walk {
    uint32_t first_item;
    uint64_t tiles_before;
};

/* The tile of that number, which never falls from call to call; false behind the last one. By the whole block. */
template <int D>
static __device__ bool find_tile(const struct cuda_prefill_params &params, struct shared<D> &mem, struct walk &walk,
                                 uint64_t number, struct tile &ret) {
    for (; walk.first_item < params.batch.header->items; walk.first_item += THREADS) {
        uint32_t tiles = tiles_of(params, walk.first_item + threadIdx.x), upto = tiles;
#pragma unroll
        for (int h = 1; h < 32; h *= 2) {
            uint32_t before = __shfl_up_sync(WARP, upto, h);
            upto += threadIdx.x % 32 >= h ? before : 0;
        }
        __syncthreads();
        if (threadIdx.x % 32 == 31)
            mem.scan[threadIdx.x / 32] = upto;
        __syncthreads();
        uint32_t total = 0;
        for (uint32_t warp = 0; warp < THREADS / 32; warp++) {
            upto += warp < threadIdx.x / 32 ? mem.scan[warp] : 0;
            total += mem.scan[warp];
        }
        if (number - walk.tiles_before >= total) {
            walk.tiles_before += total;
            continue;
        }
        uint32_t wanted = static_cast<uint32_t>(number - walk.tiles_before);
        if (wanted < upto && wanted >= upto - tiles) {
            mem.found[0] = walk.first_item + threadIdx.x;
            mem.found[1] = tiles - 1 - (wanted - (upto - tiles)); /* those that see most pages first */
        }
        __syncthreads();
        ret.item = &params.batch.items[mem.found[0]];
        ret.kv_head = mem.found[1] % params.kv_heads;
        ret.first_column = mem.found[1] / params.kv_heads * COLUMNS;
        return true;
    }
    return false;
}

/* How many pages of a run begin below a position. */
static __device__ uint32_t pages_below(const cuda_page *entries, uint32_t pages, uint32_t position) {
    if (pages == 0 || cuda_page_index(entries[pages - 1]) * TOKENS < position)
        return pages;
    uint32_t low = 0, high = pages - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (cuda_page_index(entries[middle]) * TOKENS < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* --- queries and outputs ---------------------------------------------------------------------------------------------------- */

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
        uint32_t bits = row[i / 8 * 8 * ROW_LANES + threadIdx.x % ROW_LANES * 8 + i % 8];
        float value = bf16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
        x[i] = fminf(fmaxf(value, -MAX_QUERY), MAX_QUERY);
    }
}

template <int D>
static __device__ __forceinline__ void write_worker_row(uint16_t *row, const float (&x)[D / ROW_LANES], bool bf16) {
#pragma unroll
    for (int i = 0; i < D / ROW_LANES; i++)
        row[i / 8 * 8 * ROW_LANES + threadIdx.x % ROW_LANES * 8 + i % 8] =
            bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x[i])) : __half_as_ushort(__float2half_rn(x[i]));
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

/* --- pages ------------------------------------------------------------------------------------------------------------------ */

/* V's scales relative to their largest as a power of two. By whole warps that have those of all tokens: lane l brings tokens
 * 16 (l / 8) + l % 8 and that + 8, and writes them where they are its own. */
template <int D>
static __device__ __forceinline__ void write_v_scales(struct shared<D> &mem, uint32_t parity, const float (&scale)[2],
                                                      bool own) {
    uint32_t lane = threadIdx.x % 32, token = lane / 8 * 16 + lane % 8;
    uint32_t largest = __reduce_max_sync(WARP, max(__float_as_uint(scale[0]), __float_as_uint(scale[1])));
    int exponent = exponent_above(__uint_as_float(largest), -120);
    if (own) {
        mem.v_scale[parity][token] = scale[0] * power_of_2(-exponent);
        mem.v_scale[parity][token + 8] = scale[1] * power_of_2(-exponent);
    }
    if (threadIdx.x == 0)
        mem.v_unit[parity] = power_of_2(exponent);
}

/* Starts the copy of a record. */
template <int D>
static __device__ __forceinline__ void fetch_packed(struct shared<D> &mem, uint32_t stage, cuda_page page,
                                                    uint64_t offset) {
    const uint8_t *from = reinterpret_cast<const uint8_t *>(cuda_page_address(page) + offset);
    uint8_t *to = mem.record[stage];
#pragma unroll
    for (uint32_t i = 16 * threadIdx.x; i < shape<D>::record_bytes; i += 16 * THREADS)
        copy_16(to + i, from + i);
    if (threadIdx.x == 0)
        mem.index[stage] = cuda_page_index(page);
}

/* The scales of a record that is there, each warp for a quarter of the tokens. Rows that no token has written may hold anything:
 * they become zeros. */
template <int D>
static __device__ __forceinline__ void prepare_packed(struct shared<D> &mem, uint32_t stage, uint32_t parity,
                                                      uint32_t rows) {
    uint32_t lane = threadIdx.x % 32, token = lane / 8 * 16 + lane % 8;
    uint4 raw = *reinterpret_cast<const uint4 *>(mem.record[stage] + 2 * shape<D>::code_bytes + 16 * lane);
    uint32_t k[2] = {token < rows ? raw.x : 0, token + 8 < rows ? raw.z : 0};
    uint32_t v[2] = {token < rows ? raw.y : 0, token + 8 < rows ? raw.w : 0};
    float v_scale[2] = {rotate_fp16::unpack(v[0]).x, rotate_fp16::unpack(v[1]).x};
    bool own = lane / 8 == threadIdx.x / 32;
    if (own) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float2 of = rotate_fp16::unpack(k[i]);
            mem.k_scale[parity][token + 8 * i] = make_float2(of.x / CODE_UNIT, of.y);
            mem.v_zero[parity][token + 8 * i] = __ushort_as_half(static_cast<uint16_t>(v[i] >> 16));
        }
    }
    write_v_scales<D>(mem, parity, v_scale, own);
}

/* A dense row's 16 elements of one lane, FP16 in units of a power of two such that the row's largest is just below 2^15; of K
 * divided by 4^3 / 4^f. Returns the unit of V. */
template <int D, bool K>
static __device__ __forceinline__ float convert_row(uint8_t *row, const uint4 (&from)[2], bool written, uint32_t part) {
    uint32_t word[8] = {from[0].x, from[0].y, from[0].z, from[0].w, from[1].x, from[1].y, from[1].z, from[1].w};
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        word[i] = written ? word[i] : 0;
        float2 two = rotate_bf16::unpack(word[i]);
        largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    int exponent = exponent_above(lanes_max<D / 16>(largest), -100) - 15;
    float inverse = power_of_2(-exponent - (K ? 2 * (3 - static_cast<int>(part) / shape<D>::words) : 0));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 two = rotate_bf16::unpack(word[i]);
        word[i] = rotate_fp16::pack(two.x * inverse, two.y * inverse);
    }
    reinterpret_cast<uint4 *>(row)[2 * part] = make_uint4(word[0], word[1], word[2], word[3]);
    reinterpret_cast<uint4 *>(row)[2 * part + 1] = make_uint4(word[4], word[5], word[6], word[7]);
    return power_of_2(exponent + (K ? 6 : 0));
}

/* A dense page in the same form, by the whole block, which ends it with a barrier. */
template <int D>
static __device__ void prepare_dense(struct shared<D> &mem, cuda_page page, uint64_t offset, uint32_t rows) {
    constexpr int lanes = D / 16; /* of a row */
    const uint8_t *from = reinterpret_cast<const uint8_t *>(cuda_page_address(page) + offset);
    uint32_t part = threadIdx.x % lanes;
#pragma unroll
    for (uint32_t token = threadIdx.x / lanes; token < TOKENS; token += THREADS / lanes) {
        const uint4 *k = reinterpret_cast<const uint4 *>(from + token * 2 * D) + 2 * part;
        const uint4 *v = k + TOKENS * D / 8;
        uint4 two_k[2] = {k[0], k[1]}, two_v[2] = {v[0], v[1]};
        float k_unit = convert_row<D, true>(mem.dense.k[token], two_k, token < rows, part);
        float v_unit = convert_row<D, false>(mem.dense.v[token], two_v, token < rows, part);
        if (part == 0) {
            mem.k_scale[0][token] = make_float2(k_unit, 0);
            mem.v_scale[0][token] = v_unit;
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        uint32_t token = threadIdx.x / 8 * 16 + threadIdx.x % 8;
        float scale[2] = {mem.v_scale[0][token], mem.v_scale[0][token + 8]};
        write_v_scales<D>(mem, 0, scale, true);
    }
    __syncthreads();
}

/* --- scores ----------------------------------------------------------------------------------------------------------------- */

/* Both terms of the warp's queries in one step of 16 dims. */
template <int D>
static __device__ __forceinline__ void load_query(uint32_t (&upper)[4], uint32_t (&lower)[4],
                                                  const struct shared<D> &mem, int step) {
    uint32_t lane = threadIdx.x % 32;
    uint32_t address =
        shared_address(mem.rows[threadIdx.x / 32 * WARP_COLUMNS + lane % 16]) + lane / 16 * 16 + step * 32;
    load_matrices(upper, address);
    load_matrices(lower, address + 2 * D);
}

/* score[n]: tokens 8n + 2t, 8n + 2t + 1 of column g, then of column g + 8; in units of CODE_UNIT * scale K. */
template <int D>
static __device__ __forceinline__ void packed_products(float (&score)[8][4], const struct shared<D> &mem,
                                                       const uint8_t *record) {
    constexpr int words = shape<D>::words;
    constexpr int many = D == 256 ? 4 : 8; /* tiles of 8 tokens at a time */
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < 8; first += many) {
        uint32_t word[many][words];
#pragma unroll
        for (int n = 0; n < many; n += 2) {
            const uint32_t *from =
                reinterpret_cast<const uint32_t *>(record) + ((first + n) / 2 * 32 + lane) * 2 * words;
            if constexpr (words == 1) {
                uint2 two = *reinterpret_cast<const uint2 *>(from);
                word[n][0] = two.x;
                word[n + 1][0] = two.y;
            } else {
#pragma unroll
                for (int w = 0; w < 2 * words; w += 4) {
                    uint4 four = *reinterpret_cast<const uint4 *>(from + w);
                    word[n + w / words][w % words] = four.x;
                    word[n + (w + 1) / words][(w + 1) % words] = four.y;
                    word[n + (w + 2) / words][(w + 2) % words] = four.z;
                    word[n + (w + 3) / words][(w + 3) % words] = four.w;
                }
            }
        }
#pragma unroll
        for (int w = 0; w < words; w++) {
            uint32_t low[many], high[many];
#pragma unroll
            for (int n = 0; n < many; n++) {
                low[n] = __byte_perm(word[n][w], 0, 0x4140);
                high[n] = __byte_perm(word[n][w], 0, 0x4342);
            }
#pragma unroll
            for (int f = 0; f < 4; f++) {
                const uint32_t mask = 0x00030003U << 2 * f;
                uint32_t upper[4], lower[4];
                load_query<D>(upper, lower, mem, words * f + w);
#pragma unroll
                for (int n = 0; n < many; n++)
                    rotate_fp16::multiply(score[first + n], upper, low[n] & mask, high[n] & mask);
#pragma unroll
                for (int n = 0; n < many; n++)
                    rotate_fp16::multiply(score[first + n], lower, low[n] & mask, high[n] & mask);
            }
        }
    }
}

template <int D>
static __device__ __forceinline__ void dense_products(float (&score)[8][4], const struct shared<D> &mem) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        uint32_t upper[4], lower[4];
        load_query<D>(upper, lower, mem, step);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint2 k = *reinterpret_cast<const uint2 *>(&mem.dense.k[8 * n + lane / 4][32 * step + lane % 4 * 8]);
            rotate_fp16::multiply(score[n], upper, k.x, k.y);
            rotate_fp16::multiply(score[n], lower, k.x, k.y);
        }
    }
}

/* Adds the turning part of the centre, in units of the columns. */
template <int D>
static __device__ __forceinline__ void add_centre(float (&score)[8][4], const struct shared<D> &mem,
                                                  const float2 (&page_turn)[4], uint32_t pairs) {
    uint32_t lane = threadIdx.x % 32, column = threadIdx.x / 32 * WARP_COLUMNS + lane / 4;
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
        if (8 * eight >= pairs)
            break;
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { /* column g and g + 8 of pair t, then of pair t + 4 */
            float2 of = mem.turn[column + i % 2 * 8][8 * eight + i / 2 * 4 + lane % 4],
                   by = page_turn[2 * eight + i / 2];
            float c = fmaf(of.x, by.x, of.y * by.y), s = fmaf(of.y, by.x, -(of.x * by.y));
            upper[i] = rotate_fp16::pack(c, s);
            float2 taken = rotate_fp16::unpack(upper[i]);
            lower[i] = rotate_fp16::pack(c - taken.x, s - taken.y);
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const __half2 *table = &mem.row_turn[8 * n + lane / 4][8 * eight + lane % 4];
            uint32_t b0 = *reinterpret_cast<const uint32_t *>(table);
            uint32_t b1 = *reinterpret_cast<const uint32_t *>(table + 4);
            rotate_fp16::multiply(score[n], upper, b0, b1);
            rotate_fp16::multiply(score[n], lower, b0, b1);
        }
    }
}

/* Products to scores in units of the columns. */
template <int D>
static __device__ __forceinline__ void scale_products(float (&score)[8][4], const struct shared<D> &mem,
                                                      uint32_t parity, const float (&sum)[2], const float (&sigma)[2]) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        /* {scale, zero} of two tokens */
        float4 k = *reinterpret_cast<const float4 *>(&mem.k_scale[parity][8 * n + threadIdx.x % 4 * 2]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            score[n][2 * half] = fmaf(fmaf(-k.y, sum[half], score[n][2 * half]), k.x, sigma[half]);
            score[n][2 * half + 1] = fmaf(fmaf(-k.w, sum[half], score[n][2 * half + 1]), k.z, sigma[half]);
        }
    }
}

/* p * scale V as A operands of two terms: [i] is that of tokens 16i .. 16i + 15. */
struct weights {
    uint32_t upper[4][4], lower[4][4];
};

/* Scores to weights. What the columns have so far moves to their new max. */
template <int D>
static __device__ __forceinline__ void soften(struct weights &weights, float (&score)[8][4], struct partial<D> &partial,
                                              const struct columns &columns, const struct shared<D> &mem,
                                              uint32_t parity, uint32_t position) {
    uint32_t token = threadIdx.x % 4 * 2;
    if (position + TOKENS > columns.least) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (position + 8 * n + token + i % 2 >= columns.visible[i / 2])
                    score[n][i] = -INFINITY;
    }
    float shrink[2], base[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < 8; n++)
            top = fmaxf(top, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        float max = fmaxf(partial.max[half], lanes_max<4>(top) * columns.unit[half]);
        base[half] = max == -INFINITY ? 0 : max; /* a column that sees nothing yet */
        shrink[half] = exp_2(partial.max[half] - base[half]);
        partial.max[half] = max;
        partial.sum[half] *= shrink[half];
    }
    if (__any_sync(WARP, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                partial.out[j][i] *= shrink[i / 2];
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float2 v = *reinterpret_cast<const float2 *>(&mem.v_scale[parity][8 * n + token]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float a = exp_2(fmaf(columns.unit[half], score[n][2 * half], -base[half]));
            float b = exp_2(fmaf(columns.unit[half], score[n][2 * half + 1], -base[half]));
            partial.sum[half] += a + b;
            uint32_t upper = rotate_fp16::pack(a * v.x, b * v.y);
            float2 taken = rotate_fp16::unpack(upper);
            weights.upper[n / 2][n % 2 * 2 + half] = upper;
            weights.lower[n / 2][n % 2 * 2 + half] = rotate_fp16::pack(fmaf(a, v.x, -taken.x), fmaf(b, v.y, -taken.y));
        }
    }
}

/* --- values ----------------------------------------------------------------------------------------------------------------- */

template <int D>
static __device__ __forceinline__ void add_packed_values(struct partial<D> &partial, const struct weights &weights,
                                                         const struct shared<D> &mem, const uint8_t *record,
                                                         uint32_t parity) {
    constexpr int words = shape<D>::words;
    uint32_t lane = threadIdx.x % 32;
    float zero[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half *from = &mem.v_zero[parity][16 * i + lane % 4 * 2];
        uint32_t b0 = lane < 4 ? *reinterpret_cast<const uint32_t *>(from) : 0;
        uint32_t b1 = lane < 4 ? *reinterpret_cast<const uint32_t *>(from + 8) : 0;
        rotate_fp16::multiply(zero, weights.upper[i], b0, b1);
        rotate_fp16::multiply(zero, weights.lower[i], b0, b1);
    }
    /* Column 0 of the product, which the first lane of four has. */
    float first[2] = {-CODE_UNIT * __shfl_sync(WARP, zero[0], lane & ~3U),
                      -CODE_UNIT * __shfl_sync(WARP, zero[2], lane & ~3U)};
    float unit = mem.v_unit[parity] / CODE_UNIT;
    uint32_t word[4][2 * words];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t *from =
            reinterpret_cast<const uint32_t *>(record + shape<D>::code_bytes) + (i * 32 + lane) * 2 * words;
        if constexpr (words == 1) {
            uint2 two = *reinterpret_cast<const uint2 *>(from);
            word[i][0] = two.x;
            word[i][1] = two.y;
        } else {
#pragma unroll
            for (int w = 0; w < 2 * words; w += 4) {
                uint4 four = *reinterpret_cast<const uint4 *>(from + w);
                word[i][w] = four.x;
                word[i][w + 1] = four.y;
                word[i][w + 2] = four.z;
                word[i][w + 3] = four.w;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < words; r++)
#pragma unroll
        for (int upper = 0; upper < 2; upper++) { /* the byte that holds the codes */
            float sum[4][4];
#pragma unroll
            for (int f = 0; f < 4; f++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[f][i] = first[i / 2] * power_of_2(2 * f);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t low = word[i][r] >> 8 * upper, high = word[i][words + r] >> 8 * upper;
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    const uint32_t mask = 0x00030003U << 2 * f;
                    rotate_fp16::multiply(sum[f], weights.upper[i], low & mask, high & mask);
                    rotate_fp16::multiply(sum[f], weights.lower[i], low & mask, high & mask);
                }
            }
#pragma unroll
            for (int f = 0; f < 4; f++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float &out = partial.out[words * (4 * upper + f) + r][i];
                    out = fmaf(sum[f][i], unit * power_of_2(-2 * f), out);
                }
        }
}

template <int D>
static __device__ __forceinline__ void add_dense_values(struct partial<D> &partial, const struct weights &weights,
                                                        const struct shared<D> &mem) {
    uint32_t lane = threadIdx.x % 32;
    float unit = mem.v_unit[0];
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        float sum[2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t v[4];
            load_matrices_turned(v, shared_address(&mem.dense.v[16 * i + lane % 16][16 * j + lane / 16 * 16]));
            rotate_fp16::multiply(sum[0], weights.upper[i], v[0], v[1]);
            rotate_fp16::multiply(sum[1], weights.upper[i], v[2], v[3]);
            rotate_fp16::multiply(sum[0], weights.lower[i], v[0], v[1]);
            rotate_fp16::multiply(sum[1], weights.lower[i], v[2], v[3]);
        }
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                partial.out[j + k][i] = fmaf(sum[k][i], unit, partial.out[j + k][i]);
    }
}

/* --- the walk over the pages ------------------------------------------------------------------------------------------------ */

template <int D>
static __device__ __forceinline__ void attend_packed(const struct cuda_prefill_params &params, struct shared<D> &mem,
                                                     const struct columns &columns, struct partial<D> &partial,
                                                     uint32_t stage, uint32_t parity) {
    uint32_t index = mem.index[stage], position = index * TOKENS;
    if (position >= columns.most)
        return;
    float2 page_turn[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i / 2 * 8 < columns.pairs)
            page_turn[i] = *reinterpret_cast<const float2 *>(
                params.page_turn +
                (static_cast<uint64_t>(index) * params.frequencies + mem.frequency[4 * i + threadIdx.x % 4]) * 2);
    float score[8][4] = {};
    struct weights weights;
    packed_products<D>(score, mem, mem.record[stage]);
    scale_products<D>(score, mem, parity, columns.sum, columns.sigma);
    if (columns.pairs > 0)
        add_centre<D>(score, mem, page_turn, columns.pairs);
    soften<D>(weights, score, partial, columns, mem, parity, position);
    add_packed_values<D>(partial, weights, mem, mem.record[stage], parity);
}

static __device__ __forceinline__ uint32_t rows_of(const struct cuda_batch_item &item, uint32_t index) {
    return min(item.tokens - index * TOKENS, static_cast<uint32_t>(TOKENS));
}

template <int D>
static __device__ void walk_packed(const struct cuda_prefill_params &params, struct shared<D> &mem,
                                   const struct tile &tile, uint32_t end, const struct columns &columns,
                                   struct partial<D> &partial) {
    const struct cuda_batch_item &item = *tile.item;
    const cuda_page *entries = params.batch.entries + item.packed_first;
    uint32_t pages = pages_below(entries, item.packed_pages, end);
    uint64_t offset = params.packed_offset + tile.kv_head * shape<D>::record_bytes;
    if (pages == 0)
        return;
    for (uint32_t p = 0; p < STAGES - 1; p++) {
        if (p < pages)
            fetch_packed<D>(mem, p, entries[p], offset);
        copies_commit();
    }
    cuda_page next = STAGES - 1 < pages ? entries[STAGES - 1] : 0;
    copies_wait<STAGES - 2>();
    __syncthreads();
    prepare_packed<D>(mem, 0, 0, rows_of(item, mem.index[0]));
    for (uint32_t p = 0; p < pages; p++) {
        copies_wait<STAGES - 3>();
        __syncthreads(); /* page p is prepared, page p + 1 is there, page p - 1 is done with */
        if (p + STAGES - 1 < pages) {
            fetch_packed<D>(mem, (p + STAGES - 1) % STAGES, next, offset);
            next = p + STAGES < pages ? entries[p + STAGES] : 0;
        }
        copies_commit();
        if (p + 1 < pages)
            prepare_packed<D>(mem, (p + 1) % STAGES, (p + 1) % 2, rows_of(item, mem.index[(p + 1) % STAGES]));
        attend_packed<D>(params, mem, columns, partial, p % STAGES, p % 2);
    }
    copies_wait<0>();
    __syncthreads();
}

template <int D>
static __device__ void walk_dense(const struct cuda_prefill_params &params, struct shared<D> &mem,
                                  const struct tile &tile, uint32_t end, const struct columns &columns,
                                  struct partial<D> &partial) {
    const float nothing[2] = {0, 0};
    const struct cuda_batch_item &item = *tile.item;
    const cuda_page *entries = params.batch.entries + item.dense_first;
    uint32_t pages = pages_below(entries, item.dense_pages, end);
    uint64_t offset = params.dense_offset + static_cast<uint64_t>(tile.kv_head) * shape<D>::dense_bytes;
    for (uint32_t p = 0; p < pages; p++) {
        uint32_t index = cuda_page_index(entries[p]), position = index * TOKENS;
        prepare_dense<D>(mem, entries[p], offset, rows_of(item, index));
        if (position < columns.most) {
            float score[8][4] = {};
            struct weights weights;
            dense_products<D>(score, mem);
            scale_products<D>(score, mem, 0, nothing, nothing);
            soften<D>(weights, score, partial, columns, mem, 0, position);
            add_dense_values<D>(partial, weights, mem);
        }
        __syncthreads();
    }
}

/* Positions that a column of the item sees; columns behind the last one see what that sees. */
static __device__ uint32_t visible_to(const struct cuda_prefill_params &params, const struct cuda_batch_item &item,
                                      uint32_t column) {
    uint32_t row = min(column / params.group, item.rows - 1);
    return item.tokens == 0 ? 0 : item.tokens - (item.rows - 1 - row);
}

template <int D>
static __device__ void attend_tile(const struct cuda_prefill_params &params, struct shared<D> &mem,
                                   const struct tile &tile) {
    const struct cuda_batch_item &item = *tile.item;
    const struct cuda_head &head = params.heads[tile.kv_head];
    prepare_queries<D>(params, head, mem, tile);

    uint32_t warp_column = threadIdx.x / 32 * WARP_COLUMNS;
    struct columns columns;
    columns.pairs = head.pairs;
    columns.least = visible_to(params, item, tile.first_column + warp_column);
    columns.most = visible_to(params, item, tile.first_column + warp_column + WARP_COLUMNS - 1);
    struct partial<D> partial = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t column = warp_column + threadIdx.x % 32 / 4 + 8 * half;
        columns.visible[half] = visible_to(params, item, tile.first_column + column);
        columns.unit[half] = mem.unit[column];
        columns.sigma[half] = mem.sigma[column];
        columns.sum[half] = mem.sum[column];
        partial.max[half] = -INFINITY;
    }
    uint32_t end = visible_to(params, item, tile.first_column + COLUMNS - 1);
    walk_packed<D>(params, mem, tile, end, columns, partial);
    walk_dense<D>(params, mem, tile, end, columns, partial);
    write_outputs<D>(params, head, mem, tile, partial);
}

template <int D> static __device__ __forceinline__ void prefill(const struct cuda_prefill_params &params) {
    static_assert(sizeof(struct shared<D>) <= CUDA_PREFILL_SHARED_BYTES(D), "the host asks for what the kernel uses");
    extern __shared__ __align__(16) uint8_t memory[];
    struct shared<D> &mem = *reinterpret_cast<struct shared<D> *>(memory);
    struct walk walk = {0, 0};
    struct tile tile;
    for (uint64_t number = blockIdx.x; find_tile<D>(params, mem, walk, number, tile); number += gridDim.x)
        attend_tile<D>(params, mem, tile);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    prefill_64(const __grid_constant__ struct cuda_prefill_params params) {
    prefill<64>(params);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prefill_128(const __grid_constant__ struct cuda_prefill_params params) {
    prefill<128>(params);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_256(const __grid_constant__ struct cuda_prefill_params params) {
    prefill<256>(params);
}
