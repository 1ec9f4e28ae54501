/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks (memfds) and ranges of the host backend: the functions of oscar_device_ops of the same names. */
#ifndef OSCAR_KERNELS_HOST_MEMORY_H
#define OSCAR_KERNELS_HOST_MEMORY_H

#include "oscar/device.h"

size_t host_granularity(const struct oscar_device *device);
int host_self_test(struct oscar_device *device, struct oscar_cause *cause);

int host_chunk_create(struct oscar_device *device, uint64_t bytes, struct oscar_chunk **ret, struct oscar_cause *cause);
int host_chunk_export(struct oscar_chunk *chunk, bool writable, int *ret_fd, struct oscar_cause *cause);
int host_chunk_descriptor(struct oscar_chunk *chunk, int *ret_fd, struct oscar_cause *cause);
int host_chunk_adopt(struct oscar_device *device, int fd, uint64_t bytes, struct oscar_chunk **ret,
                     struct oscar_cause *cause);
uint8_t *host_chunk_address(const struct oscar_chunk *chunk);
void host_chunk_free(struct oscar_chunk *chunk);

int host_range_reserve(struct oscar_device *device, uint64_t bytes, struct oscar_range **ret,
                       struct oscar_cause *cause);
uint8_t *host_range_address(const struct oscar_range *range);
uint8_t *host_range_locate(const struct oscar_range *range, uint64_t offset);
int host_range_map(struct oscar_range *range, const struct oscar_range_chunk *chunk, uint32_t chunks,
                   struct oscar_cause *cause);
int host_range_unmap(struct oscar_range *range, uint64_t offset, uint64_t bytes);
void host_range_free(struct oscar_range *range);

#endif
