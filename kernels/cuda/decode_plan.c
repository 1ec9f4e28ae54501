/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/decode_plan.h"

#include <stdbool.h>
#include <string.h>

#include "oscar/device.h"

_Static_assert(CUDA_MAX_DECODE_ROWS == OSCAR_MAX_DECODE_ROWS, "one bound, said twice for nvcc");

#define MOST_PAIRS CUDA_MAX_PAIRS /* the plan does not depend on the calibration */

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

struct cuda_decode_shape cuda_decode_shape_of(uint32_t processors, uint32_t shared_bytes, uint32_t head_dim,
                                              uint32_t kv_heads, uint32_t group, uint32_t rows) {
    struct cuda_decode_shape shape = {.columns = smaller(rows, OSCAR_MAX_DECODE_ROWS) * group <= 4 ? 4 : 8};
    shape.warps = CUDA_DECODE_WARPS(head_dim);
    while (shape.warps > 1 && CUDA_DECODE_SHARED_BYTES(head_dim, shape.columns, MOST_PAIRS, shape.warps) > shared_bytes)
        shape.warps--;
    shape.slices = smaller(larger(processors / kv_heads, 1), CUDA_DECODE_MAX_SLICES);
    shape.blocks = smaller(shape.slices * kv_heads, processors);
    return shape;
}

/* A walk along the units of a head. */
struct walk {
    const struct cuda_decode_shape *shape;
    const struct cuda_batch_item *item;
    uint32_t items, group;
    uint32_t index;  /* of the item where it stands */
    uint64_t before; /* units of the items before it */
};

static uint32_t blocks_of(const struct walk *walk, const struct cuda_batch_item *item) {
    return (item->rows * walk->group + walk->shape->columns - 1) / walk->shape->columns;
}

/* Units of one of the item's segments; a segment without tokens has an empty one, so that somebody writes its result. */
static uint32_t segment_units(const struct cuda_batch_item *item) {
    return larger(item->packed_pages + (item->dense_tokens + CUDA_DECODE_TILE - 1) / CUDA_DECODE_TILE, 1);
}

static uint64_t item_units(const struct walk *walk, const struct cuda_batch_item *item) {
    return item->rows > OSCAR_MAX_DECODE_ROWS ? 0 : (uint64_t)blocks_of(walk, item) * segment_units(item);
}

/* Goes on to the item that holds the unit, which exists. */
static const struct cuda_batch_item *walk_to(struct walk *walk, uint64_t unit) {
    for (;;) {
        const struct cuda_batch_item *item = &walk->item[walk->index];
        uint64_t units = item_units(walk, item);
        if (unit - walk->before < units)
            return item;
        walk->before += units;
        walk->index++;
    }
}

static struct cuda_decode_start start_at(struct walk *walk, uint64_t unit, uint64_t end) {
    const struct cuda_batch_item *item = walk_to(walk, unit);
    uint64_t in_item = unit - walk->before;
    uint32_t units = segment_units(item);
    return (struct cuda_decode_start){.item = walk->index,
                                      .block = (uint32_t)(in_item / units),
                                      .unit = (uint32_t)(in_item % units),
                                      .units = (uint32_t)(end - unit)};
}

static struct cuda_decode_query query_of(const struct walk *walk, const struct cuda_decode_start *start) {
    const struct cuda_batch_item *item = &walk->item[start->item];
    uint32_t columns = walk->shape->columns, first = start->block * columns, all = item->rows * walk->group;
    struct cuda_decode_query query = {.item = start->item,
                                      .block = start->block,
                                      .columns = smaller(all - first, columns),
                                      .head_stride = item->q_head_stride};
    for (uint32_t c = 0; c < CUDA_DECODE_MOST_COLUMNS; c++) {
        uint32_t of = first + smaller(c, query.columns - 1);
        query.column[c] = item->q_offset + (int64_t)(of / walk->group) * item->q_row_stride +
                          (int64_t)(of % walk->group) * item->q_head_stride;
    }
    return query;
}

static bool same_segment(const struct cuda_decode_start *a, const struct cuda_decode_start *b) {
    return a->item == b->item && a->block == b->block;
}

/* The first segment with which a warp of the slice begins, and the next one that is another. */
static void choose_queries(const struct walk *walk, const struct cuda_decode_start *start,
                           struct cuda_decode_query query[CUDA_DECODE_MOST_QUERIES]) {
    query[0] = query_of(walk, start);
    query[1] = query[0]; /* so that what is read at once can be read */
    query[1].item = CUDA_DECODE_NO_ITEM;
    for (uint32_t w = 1; w < walk->shape->warps && query[1].item == CUDA_DECODE_NO_ITEM; w++)
        if (start[w].units > 0 && !same_segment(&start[w], start))
            query[1] = query_of(walk, &start[w]);
}

/* The slices over which the segment of this unit extends: slice s begins with unit total * s / slices. */
static void span_at(struct walk *walk, uint64_t unit, uint64_t total, uint32_t slices, uint32_t *ret_from,
                    uint32_t *ret_to) {
    const struct cuda_batch_item *item = walk_to(walk, unit);
    uint64_t units = segment_units(item), first = walk->before + (unit - walk->before) / units * units;
    *ret_from = (uint32_t)(((first + 1) * slices - 1) / total);
    *ret_to = (uint32_t)(((first + units) * slices - 1) / total);
}

void cuda_decode_plan(const struct cuda_decode_shape *shape, uint32_t group, const struct cuda_batch_item *item,
                      uint32_t items, void *ret_plan) {
    struct cuda_decode_start *start = ret_plan;
    struct cuda_decode_slice *slice = (void *)((uint8_t *)ret_plan + cuda_decode_starts_bytes(shape));
    struct walk walk = {.shape = shape, .item = item, .items = items, .group = group};
    uint64_t total = 0;
    for (uint32_t i = 0; i < items; i++)
        total += item_units(&walk, &item[i]);
    memset(ret_plan, 0, cuda_decode_plan_bytes(shape));
    for (uint32_t s = 0; s < shape->slices; s++)
        slice[s].query[0].item = slice[s].query[1].item = CUDA_DECODE_NO_ITEM;
    /* No slice in the middle of a segment may be empty: it would not arrive. */
    uint32_t slices = total < shape->slices ? (uint32_t)total : shape->slices;
    for (uint32_t s = 0; s < slices; s++, slice++, start += shape->warps) {
        uint64_t begin = total * s / slices, end = total * (s + 1) / slices;
        span_at(&walk, begin, total, slices, &slice->first_from, &slice->first_to);
        for (uint32_t w = 0; w < shape->warps; w++)
            start[w] = start_at(&walk, begin + (end - begin) * w / shape->warps,
                                begin + (end - begin) * (w + 1) / shape->warps);
        choose_queries(&walk, start, slice->query);
        span_at(&walk, end - 1, total, slices, &slice->last_from, &slice->last_to);
    }
}
