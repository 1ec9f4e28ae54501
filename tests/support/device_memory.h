/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the kernels of a worker's device read and write, for tests and the demo: the process's own on the host, device
 * memory on a GPU. Buffers come out of one allocation and go back into it without a word to the device, so that a call in a
 * stream may free them, and so that nothing waits for a stream that a test holds up.
 */
#ifndef OSCAR_TESTS_SUPPORT_DEVICE_MEMORY_H
#define OSCAR_TESTS_SUPPORT_DEVICE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

struct device_memory;

struct device_buffer {
    void *data; /* for the device */
    size_t bytes;
    struct device_memory *memory;
};

/* By the names that oscar_client_info() gives. 0 or an error of oscar/error.h; what went wrong is told on standard error, and by
 * the functions below too. */
int device_memory_open(const char *backend, const char *device, struct device_memory **ret);
void device_memory_close(struct device_memory *memory); /* all buffers are freed; NULL is fine */

/* NULL where there is no room. */
struct device_buffer *device_buffer_new(struct device_memory *memory, size_t bytes);
void device_buffer_free(void *buffer); /* NULL is fine */
/* From and to all of a buffer, at once. */
int device_buffer_write(struct device_buffer *buffer, const void *from);
int device_buffer_read(const struct device_buffer *buffer, void *to);
/* Between any two addresses that this process or its device can access, at once. */
int device_memory_copy(struct device_memory *memory, void *to, const void *from, size_t bytes);

#endif
