/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the host backend share. Work functions run in the calling thread and the pool's, return when the work
 * is done, and check nothing that their caller in stream.c has checked: the geometry, the layer, the calibration's shape.
 */
#ifndef OSCAR_KERNELS_HOST_HOST_H
#define OSCAR_KERNELS_HOST_HOST_H

#include "oscar/device.h"

#include "kernels/host/level.h"
#include "kernels/host/pool.h"

/* store.c; a row out of range is written all the same, and the result is OSCAR_ERR_NOT_FINITE. */
int host_store(struct host_pool *pool, enum host_level level, const struct oscar_store_args *args);
/* 0 or OSCAR_ERR_NOT_FINITE. */
int host_inspect(struct host_pool *pool, enum host_level level, const struct oscar_geometry *geometry,
                 const uint8_t *dense);

/* pack.c; the outcome of each page goes to its item's status. OSCAR_ERR_NO_MEMORY. */
int host_pack(struct host_pool *pool, enum host_level level, const struct oscar_geometry *geometry,
              const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items);

/* attend.c; the result does not depend on the number of threads. OSCAR_ERR_NO_MEMORY. */
int host_attend(struct host_pool *pool, enum host_level level, const struct oscar_attend_args *args);

/* merge.c */
void host_merge(struct host_pool *pool, const struct oscar_merge_args *args);

#endif
