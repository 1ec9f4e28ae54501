/* SPDX-License-Identifier: Apache-2.0 */
/* Where chunks may lie in a range: the same on every backend. Touches nothing but its arguments. */
#ifndef OSCAR_KERNELS_SPAN_H
#define OSCAR_KERNELS_SPAN_H

#include "oscar/device.h"

/* OSCAR_ERR_INVALID where a span is empty, does not lie on multiples of `unit`, or leaves a range of `range_bytes`. */
int span_check(uint64_t offset, uint64_t bytes, uint64_t unit, uint64_t range_bytes, struct oscar_cause *cause);
/* The same of each chunk, and where one begins before the end of the chunk that it follows. */
int span_check_chunks(const struct oscar_range_chunk *chunk, uint32_t chunks, uint64_t unit, uint64_t range_bytes,
                      struct oscar_cause *cause);

#endif
