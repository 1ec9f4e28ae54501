/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/meta.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGN(bytes) (((uint64_t)(bytes) + 4095) & ~UINT64_C(4095))

#define HEADER_OFFSET UINT64_C(0)
#define MODEL_OFFSET ALIGN(sizeof(struct meta_header))
#define CHUNK_OFFSET (MODEL_OFFSET + ALIGN(META_MAX_MODELS * sizeof(struct meta_model)))
#define NODE_OFFSET (CHUNK_OFFSET + ALIGN(META_MAX_CHUNKS * sizeof(struct meta_chunk)))
#define COLD_OFFSET (NODE_OFFSET + ALIGN(META_MAX_NODES * sizeof(struct node)))
#define FILE_BYTES (COLD_OFFSET + ALIGN(META_MAX_NODES * sizeof(struct node_cold)))

/* Records are backed by so many at a time: whole pages for every record size. */
#define STEP 4096U

/* Backing is asked for before it is touched: memory that is out is an error here and would be SIGBUS there. */
static int back(const struct meta *meta, uint64_t offset, uint64_t bytes, struct oscar_cause *cause) {
    while (fallocate(meta->fd, 0, (off_t)offset, (off_t)bytes) < 0)
        if (errno != EINTR)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for metadata: %s", strerror(errno));
    return 0;
}

int meta_open(struct meta *meta, struct oscar_cause *cause) {
    *meta = (struct meta){.fd = -1, .free_node = NODE_NONE};
    meta->fd = memfd_create("oscard-metadata", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (meta->fd < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "no memfd for metadata: %s", strerror(errno));
    if (ftruncate(meta->fd, (off_t)FILE_BYTES) < 0 ||
        (meta->base = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, meta->fd, 0)) ==
            MAP_FAILED) {
        int r = oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "cannot map metadata: %s", strerror(errno));
        meta->base = NULL;
        meta_close(meta);
        return r;
    }
    meta->header = (struct meta_header *)(meta->base + HEADER_OFFSET);
    meta->model = (struct meta_model *)(meta->base + MODEL_OFFSET);
    meta->chunk = (struct meta_chunk *)(meta->base + CHUNK_OFFSET);
    meta->node = (struct node *)(meta->base + NODE_OFFSET);
    meta->cold = (struct node_cold *)(meta->base + COLD_OFFSET);
    int r = back(meta, HEADER_OFFSET, CHUNK_OFFSET, cause);
    if (r < 0) {
        meta_close(meta);
        return r;
    }
    *meta->header = (struct meta_header){
        .version = META_VERSION,
        .node_bytes = sizeof(struct node),
        .cold_bytes = sizeof(struct node_cold),
        .model_bytes = sizeof(struct meta_model),
        .chunk_bytes = sizeof(struct meta_chunk),
        .generation = 1,
    };
    randombytes_buf(&meta->header->incarnation, sizeof meta->header->incarnation);
    __atomic_store_n(&meta->header->magic, META_MAGIC, __ATOMIC_RELEASE);
    return 0;
}

void meta_close(struct meta *meta) {
    if (meta->base)
        (void)munmap(meta->base, FILE_BYTES);
    if (meta->fd >= 0)
        (void)close(meta->fd);
    *meta = (struct meta){.fd = -1, .free_node = NODE_NONE};
}

int meta_node_take(struct meta *meta, uint32_t *ret_node, struct oscar_cause *cause) {
    uint32_t taken = meta->free_node;
    if (taken != NODE_NONE) {
        meta->free_node = meta->node[taken].parent;
    } else {
        taken = meta->header->nodes;
        if (taken == META_MAX_NODES)
            return oscar_fail(cause, OSCAR_ERR_LIMIT, "the store has %u pages: it holds no more", META_MAX_NODES);
        if (taken == meta->nodes_backed) {
            int r = back(meta, NODE_OFFSET + taken * sizeof(struct node), STEP * sizeof(struct node), cause);
            if (r == 0)
                r = back(meta, COLD_OFFSET + taken * sizeof(struct node_cold), STEP * sizeof(struct node_cold), cause);
            if (r < 0)
                return r;
            meta->nodes_backed += STEP;
        }
        meta->header->nodes++;
    }
    meta->nodes_live++;
    *ret_node = taken;
    return 0;
}

void meta_node_give(struct meta *meta, uint32_t node) {
    meta_node_state(meta, node, NODE_FREE);
    meta->node[node].flags = 0;
    meta->node[node].parent = meta->free_node;
    meta->free_node = node;
    meta->nodes_live--;
}

int meta_chunk_take(struct meta *meta, const struct meta_chunk *chunk, uint32_t *ret_record,
                    struct oscar_cause *cause) {
    uint32_t record = 0;
    while (record < meta->header->chunks && meta->chunk[record].state != 0)
        record++;
    if (record == META_MAX_CHUNKS)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "the store has %u chunks: it holds no more", META_MAX_CHUNKS);
    if (record == meta->chunks_backed) {
        int r = back(meta, CHUNK_OFFSET + record * sizeof(struct meta_chunk), STEP * sizeof(struct meta_chunk), cause);
        if (r < 0)
            return r;
        meta->chunks_backed += STEP;
    }
    struct meta_chunk *ours = &meta->chunk[record];
    *ours = *chunk;
    ours->state = 0;
    __atomic_store_n(&ours->state, 1U, __ATOMIC_RELEASE);
    if (record == meta->header->chunks)
        meta->header->chunks++;
    if (chunk->generation >= meta->header->generation)
        meta->header->generation = chunk->generation + 1;
    *ret_record = record;
    return 0;
}

void meta_chunk_give(struct meta *meta, uint32_t record) {
    assert(meta->chunk[record].state == 1);
    __atomic_store_n(&meta->chunk[record].state, 0U, __ATOMIC_RELEASE);
}

uint64_t meta_bytes(const struct meta *meta) {
    return CHUNK_OFFSET + meta->chunks_backed * sizeof(struct meta_chunk) +
           meta->nodes_backed * (sizeof(struct node) + sizeof(struct node_cold));
}
