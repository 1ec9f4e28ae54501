/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker process of gpu_share: it decodes with Qwen3-8B's shape through liboscar as an engine does, a captured graph a step, and
 * is steered by lines:
 *
 *     store FIRST COUNT        stores paths of 102,400 tokens that are not cached            "stored HITS"
 *     open COUNT               as many sequences over path 0, and their batch                "opened HIT_TOKENS MPS"
 *     decode SECONDS           steps of all of them, each advanced by its token              "took STEPS SECONDS"
 *     steps COUNT              the same, that many of them                                   "took STEPS SECONDS"
 *     hold COUNT               as many steps that work alike but that nobody is told of      "took STEPS SECONDS"
 *     hold_for SECONDS         the same for some time                                        "took STEPS SECONDS"
 *     prefill SECONDS ADVANCE  stores new tokens at an engine's pace; 1: advances them, too  "going", "took TOKENS SECONDS"
 *     attach COUNT             opens the model, then each of the paths up to its first       "attached MS CONNECTED_MS OPEN_MS
 *                              attention; CONNECTED_MS: of opening the client before         LAUNCHED_MS" (last two: medians)
 */
#ifndef OSCAR_TESTS_BENCH_GPU_WORKER_H
#define OSCAR_TESTS_BENCH_GPU_WORKER_H

#include "oscar/geometry.h"

#include "tests/support/worker_process.h"

#define WORKER_PATH_PAGES 1600U
#define WORKER_PATH_TOKENS (WORKER_PATH_PAGES * OSCAR_PAGE_TOKENS)
#define WORKER_LAYERS 36U
#define WORKER_QUERY_HEADS 32U
#define WORKER_KV_HEADS 8U
#define WORKER_HEAD_DIM 128U

/* What a worker is started with. Workers of another model share nothing. */
struct worker_job {
    char socket[96];
    uint32_t number; /* another one for each worker: so its tokens are */
};

/* The body of the process, for worker_spawn. */
int worker_body(struct line_pipe *pipe, void *job);

#endif
