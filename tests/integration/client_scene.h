/* SPDX-License-Identifier: Apache-2.0 */
/* A small model over a real daemon, with random K and V that every process can make again by itself. */
#ifndef OSCAR_TESTS_CLIENT_SCENE_H
#define OSCAR_TESTS_CLIENT_SCENE_H

/* cmocka.h does not include what it needs. */
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#include "oscar/oscar.h"

#include "tests/support/daemon.h"
#include "tests/support/worker_process.h"

#define LAYERS 2U
#define QUERY_HEADS 4U
#define KV_HEADS 2U
#define HEAD_DIM 64U
#define ROW_ELEMENTS (KV_HEADS * HEAD_DIM)
#define QUERY_ELEMENTS (QUERY_HEADS * HEAD_DIM)
#define ANSWER_MS 30000 /* of another process, on a busy machine with sanitizers */

/* Fails the test in the process that runs it, and ends any other with status 1. */
void scene_must(int result, const char *call, const char *file, int line);
#define MUST(call) scene_must((call), #call, __FILE__, __LINE__)
/* The same for a condition. */
#define REQUIRE(condition) scene_must((condition) ? 0 : OSCAR_ERR_INTERNAL, #condition, __FILE__, __LINE__)
/* Called first in a forked child. */
void scene_in_child(void);

struct scene {
    struct oscar_client *client;
    struct oscar_model *model;
    struct oscar_geometry geometry;
};

/* `calibration` NULL: the default. */
void scene_open(struct scene *scene, const char *socket, const char *calibration);
void scene_close(struct scene *scene);

const uint32_t *scene_tokens(uint32_t seed, uint32_t count); /* until the next call */
/* Gaussian rows of K (side 0) or V [count][KV_HEADS][HEAD_DIM] of positions first .. first + count - 1, as floats that BF16 can
 * represent; malloced. */
float *scene_rows(uint32_t seed, uint32_t layer, unsigned side, uint32_t first, uint32_t count);
/* The same for queries [count][QUERY_HEADS][HEAD_DIM]. */
float *scene_queries(uint32_t seed, uint32_t layer, uint32_t first, uint32_t count);
uint16_t *scene_bf16(const float *from, size_t count); /* malloced */

struct oscar_seq *scene_seq(struct scene *scene, uint32_t seed, uint32_t count, uint32_t flags);
struct oscar_seq_info scene_info(const struct oscar_seq *seq);
/* Stores and advances positions from the committed length up to `end` (room is reserved here). */
void scene_write(struct scene *scene, struct oscar_seq *seq, uint32_t seed, uint32_t end);
/* The last `rows` of the first `tokens` tokens in one layer: [rows][QUERY_HEADS][HEAD_DIM] BF16, malloced. */
uint16_t *scene_attend(struct scene *scene, struct oscar_seq *seq, uint32_t seed, uint32_t layer, uint32_t tokens,
                       uint32_t rows);
/* Waits until that much of the text is cached. */
void scene_await_hit(struct scene *scene, uint32_t seed, uint32_t count, uint32_t hit);
/* Waits until a sequence over the text reads so many tokens as INT2, and returns it. */
struct oscar_seq *scene_await_packed(struct scene *scene, uint32_t seed, uint32_t count, uint32_t packed);

#endif
