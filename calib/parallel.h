/* SPDX-License-Identifier: Apache-2.0 */
/* Independent tasks on a few threads. Results must not depend on who runs what: a task writes only what is its own. */
#ifndef OSCAR_CALIB_PARALLEL_H
#define OSCAR_CALIB_PARALLEL_H

#include <stdint.h>

#include "proto/cause.h"

typedef int (*parallel_task)(void *argument, uint32_t task, struct oscar_cause *cause);

/* Runs tasks 0 .. tasks - 1. After a failure no further task is begun; the failure reported is that of the lowest number. */
int parallel_run(uint32_t threads, uint32_t tasks, parallel_task run, void *argument, struct oscar_cause *cause);

/* Makes BLAS keep to the thread that calls it: its sums would depend on how many it has. */
void parallel_quiet_blas(void);

#endif
