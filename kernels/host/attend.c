/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of attention on the host. Every (item, KV head) is cut into blocks of query columns, every block's pages into
 * chunks, by shape alone; each chunk is summed by itself and the chunks are merged in order, so the result repeats bit for bit
 * whatever the number of threads and the tasks they make. Three passes over the pool: rotate and prepare the queries, attend to
 * the chunks, merge and un-rotate. Blocks are taken in waves, so that partial results of a large batch do not need memory all
 * at once.
 */
#include "kernels/host/attend.h"

#include <math.h>
#include <string.h>

#include "kernels/host/host.h"
#include "kernels/number.h"
#include "kernels/rotate.h"

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453

/* A chunk is 32 pages, longer where that would leave more than this many partial columns an (item, KV head). */
#define CHUNK_PAGES 32U
#define PARTIAL_COLUMNS 1024U
/* Bounds of one wave: queries and partial results (a single block may need more), and blocks. */
#define WAVE_BYTES ((size_t)16 << 20)
#define WAVE_BLOCKS 512U
/* KV heads that one task takes through a page together, whose records lie side by side: as many as keep their queries and
 * partial results within this, and as leave every thread this many tasks. It does not show in the result. */
#define RUN_BYTES ((size_t)64 << 10)
#define TASKS_A_THREAD 8U
/* Finite queries stay finite: no rotation, centre or logit of rows bounded by OSCAR_MAX_ROW_MAGNITUDE overflows from here. */
#define MAX_QUERY 1e29F
/* 127 * 256: the largest 16-bit query whose high byte is still an int8 after rounding to the low byte. */
#define QUERY_UNIT 32512.0F

struct block {
    const struct oscar_attend_item *item;
    uint32_t kv_head;
    uint32_t first_column; /* column = row * group + query head of the group */
    uint32_t pages;        /* that some column sees */
    uint32_t chunks, chunk_pages;
    struct attend_columns columns;
    float *partial; /* [chunks]{out [count][d], max [count], sum [count]} */
};

/* Blocks of neighbouring KV heads with the same item, columns and chunks: one task a chunk. */
struct run {
    const struct block *block;
    uint32_t blocks;
    uint32_t first_task; /* of the wave */
};

struct plan {
    const struct oscar_attend_args *args;
    const struct attend_kernels *kernels;
    enum host_level level;
    uint32_t d, group;
    size_t record_offset[2], record_bytes[2]; /* of KV head 0 in a page; [1] packed, [0] dense */
    float *row_turn;                          /* [kv_heads][MAX_PAIRS][2][64] */
    struct block *block;                      /* of the wave */
    uint32_t blocks;
    struct run *run;
    uint32_t runs;
    char *memory;
};

static uint32_t pages_of(uint32_t tokens) { return (tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS; }

static size_t round_up(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static size_t query_bytes(uint32_t d, uint32_t count) { return (size_t)count * d * (sizeof(float) + 2); }

static size_t partial_floats(uint32_t d, uint32_t count) {
    return round_up(((size_t)d + 2) * count * sizeof(float)) / sizeof(float);
}

static size_t block_bytes(uint32_t d, const struct block *block) {
    uint32_t count = block->columns.count;
    return round_up(query_bytes(d, count)) + block->chunks * partial_floats(d, count) * sizeof(float);
}

static struct attend_partial partial_at(const struct block *block, uint32_t d, uint32_t chunk) {
    uint32_t count = block->columns.count;
    float *out = block->partial + chunk * partial_floats(d, count);
    return (struct attend_partial){.out = out, .max = out + (size_t)count * d, .sum = out + (size_t)count * (d + 1)};
}

static const struct oscar_head_calibration *head_of(const struct plan *plan, uint32_t kv_head) {
    return oscar_calibration_head(plan->args->calibration, plan->args->layer, kv_head);
}

/* --- queries --- */

/* Double, so that a K bias of norm 900 costs no precision of the logit; eight sums, so that the compiler can use vectors. */
static float dot(const float *a, const float *b, uint32_t d) {
    double sum[8] = {0};
    for (uint32_t i = 0; i < d; i += 8)
        for (uint32_t k = 0; k < 8; k++)
            sum[k] += (double)a[i + k] * b[i + k];
    return (float)(((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7])));
}

static void load_query(const struct plan *plan, const struct block *block, uint32_t column, float *q) {
    const struct oscar_attend_item *item = block->item;
    uint32_t row = column / plan->group, head = block->kv_head * plan->group + column % plan->group;
    const uint16_t *source = (const uint16_t *)item->q + row * item->q_row_stride + head * item->q_head_stride;
    bool bf16 = plan->args->geometry->dtype == OSCAR_BF16;
    for (uint32_t i = 0; i < plan->d; i++) {
        float value = bf16 ? oscar_bf16_to_float(source[i]) : oscar_fp16_to_float(source[i]);
        q[i] = value > MAX_QUERY ? MAX_QUERY : value < -MAX_QUERY ? -MAX_QUERY : value;
    }
}

/* 16-bit fixed point in two bytes. The rounded query is what packed pages see, so `sum` is that of the rounded one. */
static void split_query(struct attend_columns *columns, uint32_t c) {
    const float *q = columns->q + (size_t)c * columns->d;
    int8_t *high = columns->high + (size_t)c * columns->d, *low = columns->low + (size_t)c * columns->d;
    float largest = 0;
    for (uint32_t i = 0; i < columns->d; i++)
        largest = fabsf(q[i]) > largest ? fabsf(q[i]) : largest;
    /* A query below the smallest normal number is as good as zero, and its inverse would be infinite. */
    float inverse = largest >= 0x1p-100F ? QUERY_UNIT / largest : 0;
    int32_t sum = 0;
    for (uint32_t i = 0; i < columns->d; i++) {
        int32_t fixed = (int32_t)lrintf(q[i] * inverse);
        int32_t upper = (fixed + 128) >> 8;
        high[i] = (int8_t)upper;
        low[i] = (int8_t)(fixed - upper * 256);
        sum += fixed;
    }
    columns->step[c] = largest / QUERY_UNIT;
    columns->sum[c] = (float)sum;
}

static void prepare_block(const struct plan *plan, struct block *block) {
    struct attend_columns *columns = &block->columns;
    const struct oscar_head_calibration *head = head_of(plan, block->kv_head);
    uint32_t d = plan->d, rows = block->item->rows;
    float scale = (float)(plan->args->softmax_scale * LOG2_E);

    for (uint32_t c = 0; c < columns->count; c++) {
        uint32_t column = block->first_column + c;
        columns->visible[c] = block->item->tokens - (rows - 1 - column / plan->group);
        load_query(plan, block, column, columns->q + (size_t)c * d);
    }
    oscar_rotate(plan->level, head->rotation_k, d, false, columns->count, columns->q, d, columns->q, d);

    const float *centre = head->centre_static;
    columns->centred = centre != NULL;
    columns->pairs = centre != NULL ? head->pairs : 0;
    columns->pair = head->centre_pair;
    columns->row_turn = plan->row_turn + (size_t)block->kv_head * OSCAR_MAX_PAIRS * 2 * OSCAR_PAGE_TOKENS;
    memset(columns->alpha, 0, sizeof(columns->alpha));
    memset(columns->beta, 0, sizeof(columns->beta));
    for (uint32_t c = 0; c < columns->count; c++) {
        float *q = columns->q + (size_t)c * d;
        for (uint32_t i = 0; i < d; i++)
            q[i] *= scale;
        split_query(columns, c);
        columns->sigma[c] = centre != NULL ? dot(q, centre, d) : 0;
        for (uint32_t i = 0; i < columns->pairs; i++) {
            columns->alpha[c][i] = dot(q, head->centre_cos + (size_t)i * d, d);
            columns->beta[c][i] = dot(q, head->centre_sin + (size_t)i * d, d);
        }
    }
}

/* The head's pairs of the row table, rows side by side as the kernels read them. */
static void prepare_row_turn(const struct plan *plan, uint32_t kv_head) {
    const struct oscar_head_calibration *head = head_of(plan, kv_head);
    const struct oscar_turns *turns = &plan->args->calibration->turns;
    float *table = plan->row_turn + (size_t)kv_head * OSCAR_MAX_PAIRS * 2 * OSCAR_PAGE_TOKENS;
    for (uint32_t i = 0; i < head->pairs; i++) {
        for (uint32_t r = 0; r < OSCAR_PAGE_TOKENS; r++) {
            const float *turn = turns->row_turn + ((size_t)r * turns->frequencies + (uint32_t)head->centre_pair[i]) * 2;
            table[(size_t)(2 * i) * OSCAR_PAGE_TOKENS + r] = turn[0];
            table[(size_t)(2 * i + 1) * OSCAR_PAGE_TOKENS + r] = turn[1];
        }
    }
}

static void prepare_task(void *argument, uint32_t task, uint32_t worker) {
    struct plan *plan = argument;
    (void)worker;
    if (task < plan->blocks)
        prepare_block(plan, &plan->block[task]);
    else
        prepare_row_turn(plan, task - plan->blocks);
}

/* --- pages --- */

static const uint8_t *record_at(const struct plan *plan, const struct block *block, uint32_t page, bool *ret_packed) {
    oscar_page_ref ref = block->item->pages[page];
    const struct oscar_arena_view *arena = &plan->args->arenas[oscar_page_ref_form(ref)];
    bool packed = oscar_page_ref_form(ref) == OSCAR_FORM_PACKED;
    *ret_packed = packed;
    return arena->base + oscar_page_ref_id(ref) * arena->stride + plan->record_offset[packed] +
           block->kv_head * plan->record_bytes[packed];
}

static void begin_partial(const struct block *block, uint32_t d, const struct attend_partial *partial) {
    memset(partial->out, 0, sizeof(float) * (d + 2) * block->columns.count);
    for (uint32_t c = 0; c < block->columns.count; c++)
        partial->max[c] = -INFINITY;
}

static void attend_page(const struct plan *plan, const struct block *block, uint32_t chunk, uint32_t p,
                        const struct block *ahead, uint32_t ahead_page) {
    const struct oscar_turns *turns = &plan->args->calibration->turns;
    const struct attend_partial partial = partial_at(block, plan->d, chunk);
    uint32_t last_visible = block->columns.visible[block->columns.count - 1];
    bool packed, ahead_packed;
    struct attend_page page = {.record = record_at(plan, block, p, &packed), .first = p * OSCAR_PAGE_TOKENS};
    page.rows = last_visible - page.first < OSCAR_PAGE_TOKENS ? last_visible - page.first : OSCAR_PAGE_TOKENS;
    if (packed && block->columns.pairs > 0)
        page.turn = turns->page_turn + (size_t)p * turns->frequencies * 2;
    if (ahead != NULL) {
        page.ahead = record_at(plan, ahead, ahead_page, &ahead_packed);
        page.ahead_bytes = (uint32_t)plan->record_bytes[ahead_packed];
    }
    (packed ? plan->kernels->packed : plan->kernels->dense)(&block->columns, &page, &partial);
}

static void attend_task(void *argument, uint32_t task, uint32_t worker) {
    const struct plan *plan = argument;
    (void)worker;
    uint32_t low = 0, high = plan->runs;
    while (high - low > 1) { /* the run whose chunks hold the task */
        uint32_t middle = (low + high) / 2;
        if (plan->run[middle].first_task <= task)
            low = middle;
        else
            high = middle;
    }
    const struct run *run = &plan->run[low];
    uint32_t chunk = task - run->first_task, first = chunk * run->block->chunk_pages;
    uint32_t end = first + run->block->chunk_pages;
    if (end > run->block->pages)
        end = run->block->pages;
    for (uint32_t b = 0; b < run->blocks; b++) {
        const struct attend_partial partial = partial_at(&run->block[b], plan->d, chunk);
        begin_partial(&run->block[b], plan->d, &partial);
    }
    for (uint32_t p = first; p < end; p++)
        for (uint32_t b = 0; b < run->blocks; b++) {
            /* The record after the next is prefetched: pages lie a page stride apart, no hardware prefetcher follows, and
             * one record's work hides less than a miss. */
            uint32_t ahead_page = p + (b + 2) / run->blocks;
            const struct block *ahead = ahead_page < end ? &run->block[(b + 2) % run->blocks] : NULL;
            attend_page(plan, &run->block[b], chunk, p, ahead, ahead_page);
        }
}

/* --- merge --- */

static void store_row(const struct plan *plan, const struct oscar_attend_item *item, uint32_t row, uint32_t head,
                      const float *values) {
    uint16_t *out = (uint16_t *)item->out + row * item->out_row_stride + head * item->out_head_stride;
    bool bf16 = plan->args->geometry->dtype == OSCAR_BF16;
    for (uint32_t i = 0; i < plan->d; i++)
        out[i] = bf16 ? oscar_bf16_from_float(values[i]) : oscar_fp16_from_float(values[i]);
}

/* One column of all chunks: the normalised output, still rotated, and the log-sum-exp in natural units. */
static float merge_column(const struct plan *plan, const struct block *block, uint32_t c, float *ret_out) {
    double out[256] = {0}, sum = 0;
    float max = -INFINITY;
    for (uint32_t chunk = 0; chunk < block->chunks; chunk++)
        max = fmaxf(max, partial_at(block, plan->d, chunk).max[c]);
    for (uint32_t chunk = 0; chunk < block->chunks; chunk++) {
        struct attend_partial partial = partial_at(block, plan->d, chunk);
        if (partial.max[c] == -INFINITY) /* a causal row that sees none of the chunk */
            continue;
        double weight = exp2((double)partial.max[c] - max);
        sum += weight * partial.sum[c];
        for (uint32_t i = 0; i < plan->d; i++)
            out[i] += weight * partial.out[(size_t)c * plan->d + i];
    }
    for (uint32_t i = 0; i < plan->d; i++)
        ret_out[i] = (float)(out[i] / sum);
    return (float)((max + log2(sum)) * LN_2);
}

static void merge_task(void *argument, uint32_t task, uint32_t worker) {
    const struct plan *plan = argument;
    (void)worker;
    const struct block *block = &plan->block[task];
    const struct oscar_attend_item *item = block->item;
    uint32_t count = block->columns.count, d = plan->d;
    float *rows = block->columns.q; /* the queries are spent */
    for (uint32_t c = 0; c < count; c++) {
        uint32_t column = block->first_column + c;
        float lse = merge_column(plan, block, c, rows + (size_t)c * d);
        if (item->lse != NULL)
            item->lse[(size_t)(column / plan->group) * plan->args->geometry->query_heads +
                      block->kv_head * plan->group + column % plan->group] = lse;
    }
    oscar_rotate(plan->level, head_of(plan, block->kv_head)->rotation_v, d, true, count, rows, d, rows, d);
    for (uint32_t c = 0; c < count; c++) {
        uint32_t column = block->first_column + c;
        store_row(plan, item, column / plan->group, block->kv_head * plan->group + column % plan->group,
                  rows + (size_t)c * d);
    }
}

/* --- plan --- */

/* An item without tokens has no softmax: zeros, and a weight of zero for whoever merges by log-sum-exp. */
static void answer_nothing(const struct plan *plan, const struct oscar_attend_item *item) {
    const float zeros[256] = {0};
    uint32_t heads = plan->args->geometry->query_heads;
    for (uint32_t row = 0; row < item->rows; row++) {
        for (uint32_t head = 0; head < heads; head++) {
            store_row(plan, item, row, head, zeros);
            if (item->lse != NULL)
                item->lse[(size_t)row * heads + head] = -INFINITY;
        }
    }
}

/* Where the walk over all blocks stands: by item, then column, then KV head. */
struct cursor {
    uint32_t item, kv_head, column;
};

/* The cursor's block without its memory; false at the end of the batch. */
static bool describe_block(const struct plan *plan, struct cursor *cursor, struct block *block) {
    const struct oscar_attend_args *args = plan->args;
    while (cursor->item < args->items && (args->item[cursor->item].tokens == 0 || args->item[cursor->item].rows == 0))
        cursor->item++;
    if (cursor->item == args->items)
        return false;
    const struct oscar_attend_item *item = &args->item[cursor->item];
    uint32_t columns = item->rows * plan->group;
    uint32_t count = columns - cursor->column < ATTEND_COLUMNS ? columns - cursor->column : ATTEND_COLUMNS;
    uint32_t last_row = (cursor->column + count - 1) / plan->group;
    uint32_t visible = item->tokens - (item->rows - 1 - last_row);
    uint32_t most_chunks = columns < PARTIAL_COLUMNS ? PARTIAL_COLUMNS / columns : 1;
    block->item = item;
    block->kv_head = cursor->kv_head;
    block->first_column = cursor->column;
    block->pages = pages_of(visible);
    block->chunk_pages = (block->pages + most_chunks - 1) / most_chunks;
    if (block->chunk_pages < CHUNK_PAGES)
        block->chunk_pages = CHUNK_PAGES;
    block->chunks = (block->pages + block->chunk_pages - 1) / block->chunk_pages;
    block->columns.d = plan->d;
    block->columns.count = count;
    return true;
}

static void step_cursor(const struct plan *plan, struct cursor *cursor, const struct block *block) {
    if (++cursor->kv_head < plan->args->geometry->kv_heads)
        return;
    cursor->kv_head = 0;
    cursor->column += block->columns.count;
    if (cursor->column < block->item->rows * plan->group)
        return;
    cursor->column = 0;
    cursor->item++;
}

/* Blocks that a run may have: see RUN_BYTES. */
static uint32_t longest_run(const struct plan *plan, uint32_t threads) {
    uint64_t chunks = 0;
    size_t largest = 1;
    for (uint32_t b = 0; b < plan->blocks; b++) {
        const struct block *block = &plan->block[b];
        size_t bytes =
            query_bytes(plan->d, block->columns.count) + partial_floats(plan->d, block->columns.count) * sizeof(float);
        chunks += block->chunks;
        largest = bytes > largest ? bytes : largest;
    }
    uint64_t longest = RUN_BYTES / largest;
    if (threads > 1 && chunks / ((uint64_t)threads * TASKS_A_THREAD) < longest)
        longest = chunks / ((uint64_t)threads * TASKS_A_THREAD);
    return longest > 1 ? (uint32_t)longest : 1;
}

/* Joins the wave's blocks into runs; returns the number of tasks. */
static uint32_t make_runs(struct plan *plan, uint32_t longest) {
    uint32_t tasks = 0;
    plan->runs = 0;
    for (uint32_t b = 0; b < plan->blocks; b++) {
        const struct block *block = &plan->block[b];
        struct run *last = plan->runs > 0 ? &plan->run[plan->runs - 1] : NULL;
        if (last != NULL && last->block->item == block->item && last->block->first_column == block->first_column &&
            last->blocks < longest) {
            last->blocks++;
            continue;
        }
        plan->run[plan->runs++] = (struct run){block, 1, tasks};
        tasks += block->chunks;
    }
    return tasks;
}

static void run_wave(struct host_pool *pool, struct plan *plan, bool with_row_turn) {
    char *memory = plan->memory;
    for (uint32_t b = 0; b < plan->blocks; b++) {
        struct block *block = &plan->block[b];
        size_t elements = (size_t)block->columns.count * plan->d;
        block->columns.q = (float *)(void *)memory;
        block->columns.high = (int8_t *)memory + elements * sizeof(float);
        block->columns.low = block->columns.high + elements;
        block->partial = (float *)(void *)(memory + round_up(query_bytes(plan->d, block->columns.count)));
        memory += block_bytes(plan->d, block);
    }
    uint32_t tasks = make_runs(plan, longest_run(plan, host_pool_threads(pool)));
    host_pool_run(pool, plan->blocks + (with_row_turn ? plan->args->geometry->kv_heads : 0), prepare_task, plan);
    host_pool_run(pool, tasks, attend_task, plan);
    host_pool_run(pool, plan->blocks, merge_task, plan);
}

static const struct attend_kernels *kernels_of(enum host_level level) {
#ifdef HOST_X86_LEVELS
    if (level == HOST_AVX512)
        return &attend_kernels_avx512;
    if (level == HOST_AVX2)
        return &attend_kernels_avx2;
#endif
    (void)level;
    return &attend_kernels_portable;
}

/* Largest wave: bytes for its blocks' queries and partial results, and the number of its blocks. */
static void measure_waves(const struct plan *plan, size_t *ret_bytes, uint32_t *ret_blocks) {
    struct cursor cursor = {0};
    struct block block;
    size_t total = 0, largest = 0, blocks = 0;
    for (; describe_block(plan, &cursor, &block); step_cursor(plan, &cursor, &block)) {
        size_t bytes = block_bytes(plan->d, &block);
        largest = bytes > largest ? bytes : largest;
        total += bytes;
        blocks++;
    }
    size_t bound = largest > WAVE_BYTES ? largest : WAVE_BYTES;
    *ret_bytes = total < bound ? total : bound;
    *ret_blocks = (uint32_t)(blocks < WAVE_BLOCKS ? blocks : WAVE_BLOCKS);
}

/* The turn table must reach the last page of every item of a layer with rotating pairs. */
static bool turns_reach(const struct oscar_attend_args *args) {
    uint32_t pages = 0, pairs = 0;
    for (uint32_t h = 0; h < args->geometry->kv_heads; h++)
        pairs |= oscar_calibration_head(args->calibration, args->layer, h)->pairs;
    for (uint32_t i = 0; i < args->items; i++)
        pages = pages_of(args->item[i].tokens) > pages ? pages_of(args->item[i].tokens) : pages;
    return pairs == 0 || pages <= args->calibration->turns.pages;
}

int host_attend(struct host_pool *pool, enum host_level level, const struct oscar_attend_args *args) {
    const struct oscar_geometry *geometry = args->geometry;
    struct plan plan = {.args = args, .kernels = kernels_of(level), .level = level, .d = geometry->head_dim};
    plan.group = geometry->query_heads / geometry->kv_heads;
    plan.record_bytes[0] = oscar_dense_record_bytes(plan.d);
    plan.record_bytes[1] = oscar_packed_record_bytes(plan.d);
    for (unsigned packed = 0; packed < 2; packed++)
        plan.record_offset[packed] = plan.record_bytes[packed] * args->layer * geometry->kv_heads;
    if (!turns_reach(args))
        return OSCAR_ERR_INVALID;

    size_t bytes;
    uint32_t most_blocks;
    measure_waves(&plan, &bytes, &most_blocks);
    size_t turn_bytes = (size_t)geometry->kv_heads * OSCAR_MAX_PAIRS * 2 * OSCAR_PAGE_TOKENS * sizeof(float);
    size_t block_array = round_up(most_blocks * sizeof(struct block));
    size_t run_array = round_up(most_blocks * sizeof(struct run));
    char *memory = host_pool_scratch(pool, 0, turn_bytes + block_array + run_array + bytes);
    if (memory == NULL)
        return OSCAR_ERR_NO_MEMORY;
    plan.row_turn = (float *)(void *)memory;
    plan.block = (struct block *)(void *)(memory + turn_bytes);
    plan.run = (struct run *)(void *)(memory + turn_bytes + block_array);
    plan.memory = memory + turn_bytes + block_array + run_array;

    for (uint32_t i = 0; i < args->items; i++)
        if (args->item[i].tokens == 0)
            answer_nothing(&plan, &args->item[i]);

    struct cursor cursor = {0};
    bool first = true;
    for (;;) {
        size_t used = 0;
        plan.blocks = 0;
        while (plan.blocks < most_blocks && describe_block(&plan, &cursor, &plan.block[plan.blocks])) {
            struct block *block = &plan.block[plan.blocks];
            used += block_bytes(plan.d, block);
            if (used > bytes)
                break;
            plan.blocks++;
            step_cursor(&plan, &cursor, block);
        }
        if (plan.blocks == 0)
            return 0;
        run_wave(pool, &plan, first);
        first = false;
    }
}
