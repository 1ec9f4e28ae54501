/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A random batch of tests/unit/attend_fixture.h on the device under test: its pages, queries and calibration are copied there,
 * whatever attention must not read is poison, and what it wrote comes back into the fixture, where the float64 oracle's results
 * are.
 */
#ifndef OSCAR_TESTS_GPU_ATTEND_SCENE_H
#define OSCAR_TESTS_GPU_ATTEND_SCENE_H

#include "tests/gpu/rig.h"
#include "tests/unit/attend_fixture.h"

struct scene {
    struct rig *rig;
    struct fixture *fixture; /* outlives the scene */
    struct oscar_arena_view arenas[OSCAR_FORMS];
    struct oscar_batch_item item[FIXTURE_ITEMS];
    struct oscar_batch_attend_args args;
    struct oscar_batch_impl *batch;
    size_t q_elements, out_elements, lse_elements;
    uint16_t *out; /* device memory */
    float *lse;
    void *owned[OSCAR_FORMS + 3];
    uint32_t owned_count;
};

/* The batch has all items of the fixture; `limits` NULL: as much as they need. */
struct scene *scene_open(struct rig *rig, struct fixture *fixture, const struct oscar_batch_limits *limits);
void scene_close(struct scene *scene);

/* Enqueues the batch again and attends to it; the results of all items are in the fixture when it returns. */
void scene_attend(struct scene *scene, struct oscar_stream_impl *stream);
/* Fails the test where an output or a log-sum-exp of the fixture is off by more than `bound` (as fixture_check measures it), or
 * where bytes between the rows were touched. Returns the largest error. */
double scene_check(struct scene *scene, double bound);
/* Attends, and `times` times again: the outputs of all items are the same bits each time. */
void scene_check_repeats(struct scene *scene, struct oscar_stream_impl *stream, uint32_t times);

#endif
