/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/state.h"

static int announced_reserve(struct binding *binding, enum oscar_form form, uint32_t chunks,
                             struct oscar_cause *cause) {
    if (chunks <= binding->capacity[form])
        return 0;
    uint32_t capacity = binding->capacity[form] * 2 > chunks ? binding->capacity[form] * 2 : chunks;
    uint64_t *more = realloc(binding->announced[form], capacity * sizeof *more);
    if (!more)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the client's list of chunks");
    memset(more + binding->capacity[form], 0, (capacity - binding->capacity[form]) * sizeof *more);
    binding->announced[form] = more;
    binding->capacity[form] = capacity;
    return 0;
}

/* Calls the hook: the device is not asked, the chunk has its descriptors. */
static int announce(struct store_client *client, struct binding *binding, const struct chunk *chunk,
                    struct oscar_cause *cause) {
    struct store *store = client->store;
    enum oscar_form form = chunk->arena->form;
    int r = announced_reserve(binding, form, chunk->index + 1, cause);
    if (r < 0)
        return r;
    if (binding->announced[form][chunk->index] == chunk->generation)
        return 0;

    const struct oscar_chunk_info info = {
        .model = binding->model->handle,
        .form = form,
        .index = chunk->index,
        .generation = chunk->generation,
        .bytes = chunk->bytes,
        .writable = chunk->share == &binding->dense,
    };
    store->options.hooks.chunk_announce(store->options.hooks.arg, client->arg, &info,
                                        info.writable ? chunk->writer_fd : chunk->reader_fd);
    binding->announced[form][chunk->index] = chunk->generation;
    return 0;
}

int client_announce_shared(struct store_client *client, struct binding *binding, struct oscar_cause *cause) {
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        const struct arena *arena = &binding->model->arena[form];
        if (form == OSCAR_FORM_DENSE || binding->epoch[form] == arena->epoch)
            continue;
        for (uint32_t i = 0; i < arena->capacity; i++) {
            int r = arena->chunk[i] ? announce(client, binding, arena->chunk[i], cause) : 0;
            if (r < 0)
                return r;
        }
        binding->epoch[form] = arena->epoch;
    }
    return 0;
}

int client_announce_dense(struct store_client *client, struct binding *binding, uint32_t slot,
                          struct oscar_cause *cause) {
    return announce(client, binding, arena_chunk(&binding->model->arena[OSCAR_FORM_DENSE], slot), cause);
}

void client_chunk_gone(struct store_client *client, const struct chunk *chunk) {
    enum oscar_form form = chunk->arena->form;
    struct binding *binding;
    LIST_FOREACH(binding, &client->bindings, in_client) {
        if (&binding->model->arena[form] != chunk->arena || chunk->index >= binding->capacity[form] ||
            binding->announced[form][chunk->index] != chunk->generation)
            continue;
        binding->announced[form][chunk->index] = 0;
        if (client->gone)
            continue;
        const struct oscar_chunk_info info = {
            .model = binding->model->handle,
            .form = form,
            .index = chunk->index,
            .generation = chunk->generation,
            .bytes = chunk->bytes,
        };
        client->store->options.hooks.chunk_gone(client->store->options.hooks.arg, client->arg, &info);
    }
}

int client_fence_take(struct store_client *client, uint32_t *ret_slot, struct oscar_cause *cause) {
    for (uint32_t i = 0; i < OSCAR_FENCE_SLOTS; i++) {
        uint32_t slot = (client->fence_cursor + i) % OSCAR_FENCE_SLOTS;
        if (i + 64 <= OSCAR_FENCE_SLOTS && slot % 64 == 0 && client->fence_used[slot / 64] == UINT64_MAX) {
            i += 63;
            continue;
        }
        if (client->fence_used[slot / 64] >> (slot % 64) & 1)
            continue;
        client->fence_used[slot / 64] |= UINT64_C(1) << (slot % 64);
        client->fence_cursor = (slot + 1) % OSCAR_FENCE_SLOTS;
        /* The last sequence there is over, its stream has passed its last value: nobody else writes here any more. */
        __atomic_store_n((uint64_t *)&client->fences[slot], 0, __ATOMIC_RELEASE);
        *ret_slot = slot;
        return 0;
    }
    return oscar_fail(cause, OSCAR_ERR_LIMIT, "all %u fences of the connection are in use", OSCAR_FENCE_SLOTS);
}

void client_fence_give(struct store_client *client, uint32_t slot) {
    client->fence_used[slot / 64] &= ~(UINT64_C(1) << (slot % 64));
}

int store_client_new(struct store *store, void *client_arg, void *window, oscar_fence_slot *fences,
                     const char *group_key, struct store_client **ret) {
    struct store_client *client = calloc(1, sizeof *client);
    if (!client)
        return OSCAR_ERR_NO_MEMORY;
    size_t length = strnlen(group_key, sizeof client->group_key);
    if (length == sizeof client->group_key) {
        free(client);
        return OSCAR_ERR_LIMIT;
    }
    memcpy(client->group_key, group_key, length);
    client->store = store;
    client->arg = client_arg;
    client->window = window;
    client->fences = fences;
    client->number = ++store->client_number;
    LIST_INIT(&client->bindings);
    LIST_INIT(&client->seqs);
    LIST_INIT(&client->leases);
    LIST_INSERT_HEAD(&store->clients, client, in_store);
    store->client_count++;
    *ret = client;
    return 0;
}

void store_client_gone(struct store *store, struct store_client *client) {
    if (client->gone)
        return;
    client->gone = true;
    while (!LIST_EMPTY(&client->leases))
        lease_free(LIST_FIRST(&client->leases));
    for (struct seq *seq = LIST_FIRST(&client->seqs), *next; seq; seq = next) {
        next = LIST_NEXT(seq, in_client);
        seq_abandon(seq);
    }
    flight_wake(store);
}

/* Nothing raises the counter of a dead client's sequence any more. Whoever waits for it (a kernel of another process, a debugger, a
 * forked child) is not to wait for ever: it gets the last value that was promised. */
static void fence_release(const struct seq *seq) {
    uint64_t promised = seq->close_fence != UINT64_MAX ? seq->close_fence : seq->fence + 1;
    oscar_fence_slot *slot = &seq->client->fences[seq->fence_slot];
    if (!oscar_fence_reached(slot, promised))
        __atomic_store_n((uint64_t *)slot, promised, __ATOMIC_RELEASE);
}

void store_client_exited(struct store *store, struct store_client *client) {
    store_client_gone(store, client); /* what was not complete by now is not published */
    client->exited = true;
    const struct seq *late;
    LIST_FOREACH(late, &client->seqs, in_client) { fence_release(late); }
    for (struct seq *seq = LIST_FIRST(&client->seqs), *next; seq; seq = next) {
        next = LIST_NEXT(seq, in_client);
        (void)seq_end_if_done(seq);
    }
    client_free_if_done(client);
}

/* Sequences may outlive the exit by an inspection that still runs. */
void client_free_if_done(struct store_client *client) {
    if (!client->exited || !LIST_EMPTY(&client->seqs))
        return;
    struct store *store = client->store;
    struct binding *binding;
    while ((binding = LIST_FIRST(&client->bindings))) {
        LIST_REMOVE(binding, in_client);
        share_close(&binding->dense, &binding->model->arena[OSCAR_FORM_DENSE]);
        if (binding->opens > 0)
            binding->model->clients--;
        for (unsigned form = 0; form < OSCAR_FORMS; form++)
            free(binding->announced[form]);
        free(binding);
    }
    LIST_REMOVE(client, in_store);
    store->client_count--;
    store->pack_starved = false;
    void *client_arg = client->arg;
    free(client);
    if (store->options.hooks.client_over)
        store->options.hooks.client_over(store->options.hooks.arg, client_arg);
}
