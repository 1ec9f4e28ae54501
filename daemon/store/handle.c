/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "daemon/store/state.h"

static int grow(struct handle_table *table, struct oscar_cause *cause) {
    uint32_t capacity = table->capacity ? table->capacity * 2 : 16;
    void **object = realloc(table->object, capacity * sizeof *object);
    if (object)
        table->object = object;
    uint32_t *generation = realloc(table->generation, capacity * sizeof *generation);
    if (generation)
        table->generation = generation;
    uint32_t *unused = realloc(table->free, capacity * sizeof *unused);
    if (unused)
        table->free = unused;
    if (!object || !generation || !unused)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for handles");
    for (uint32_t i = capacity; i-- > table->capacity;) {
        table->object[i] = NULL;
        table->generation[i] = 0;
        table->free[table->frees++] = i;
    }
    table->capacity = capacity;
    return 0;
}

int handle_take(struct handle_table *table, void *object, uint64_t *ret_handle, struct oscar_cause *cause) {
    if (table->frees == 0) {
        int r = grow(table, cause);
        if (r < 0)
            return r;
    }
    uint32_t index = table->free[--table->frees];
    if (++table->generation[index] == 0)
        table->generation[index] = 1;
    table->object[index] = object;
    *ret_handle = index | (uint64_t)table->generation[index] << 32;
    return 0;
}

void *handle_get(const struct handle_table *table, uint64_t handle, int *ret_error) {
    uint32_t index = (uint32_t)handle, generation = (uint32_t)(handle >> 32);
    if (index >= table->capacity || generation == 0 || generation > table->generation[index]) {
        *ret_error = OSCAR_ERR_NOT_FOUND;
        return NULL;
    }
    if (generation != table->generation[index] || !table->object[index]) {
        *ret_error = OSCAR_ERR_STALE;
        return NULL;
    }
    return table->object[index];
}

void handle_give(struct handle_table *table, uint64_t handle) {
    uint32_t index = (uint32_t)handle;
    table->object[index] = NULL;
    table->free[table->frees++] = index;
}

void handle_table_close(struct handle_table *table) {
    free(table->object);
    free(table->generation);
    free(table->free);
    *table = (struct handle_table){0};
}
