/* SPDX-License-Identifier: Apache-2.0 */
/* Notices: chunks that came or went. */
#include <inttypes.h>
#include <string.h>

#include "proto/oscar.pb-c.h"
#include "proto/wire.h"
#include "proto/wire_arena.h"
#include "proto/wire_field.h"

/* OSCAR_MAX_RECORD_FDS chunks of 80 bytes, their pointers, and what protobuf-c needs while it scans them: 22 KiB. */
#define ARENA_BYTES 49152U

static int check_count(size_t chunks, struct oscar_cause *cause) {
    if (chunks < 1 || chunks > OSCAR_MAX_RECORD_FDS)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "a notice of %zu chunks: must be 1 to %u", chunks,
                          OSCAR_MAX_RECORD_FDS);
    return OSCAR_OK;
}

static int check_form(uint32_t form, struct oscar_cause *cause) {
    if (form >= OSCAR_FORMS)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "a chunk of form %" PRIu32 ": this version knows %u forms", form,
                          OSCAR_FORMS);
    return OSCAR_OK;
}

static int encode_chunks(const struct oscar_notice *notice, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    Oscar__V1__Notice message = OSCAR__V1__NOTICE__INIT;
    Oscar__V1__ChunksNotice chunks = OSCAR__V1__CHUNKS_NOTICE__INIT;
    Oscar__V1__ChunkInfo chunk[OSCAR_MAX_RECORD_FDS];
    Oscar__V1__ChunkInfo *pointer[OSCAR_MAX_RECORD_FDS];
    for (uint32_t i = 0; i < notice->chunks; i++) {
        const struct oscar_chunk_info *info = &notice->chunk[i];
        oscar__v1__chunk_info__init(&chunk[i]);
        chunk[i].model = info->model;
        chunk[i].form = info->form;
        chunk[i].index = info->index;
        chunk[i].generation = info->generation;
        chunk[i].bytes = info->bytes;
        chunk[i].writable = info->writable;
        pointer[i] = &chunk[i];
    }
    chunks.n_chunks = notice->chunks;
    chunks.chunks = pointer;
    message.body_case = OSCAR__V1__NOTICE__BODY_CHUNKS;
    message.chunks = &chunks;
    return oscar_wire_pack(&message.base, buffer, capacity, ret_bytes);
}

static int encode_chunks_gone(const struct oscar_notice *notice, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    Oscar__V1__Notice message = OSCAR__V1__NOTICE__INIT;
    Oscar__V1__ChunksGoneNotice gone = OSCAR__V1__CHUNKS_GONE_NOTICE__INIT;
    Oscar__V1__ChunkGone chunk[OSCAR_MAX_RECORD_FDS];
    Oscar__V1__ChunkGone *pointer[OSCAR_MAX_RECORD_FDS];
    for (uint32_t i = 0; i < notice->chunks; i++) {
        const struct oscar_chunk_info *info = &notice->chunk[i];
        oscar__v1__chunk_gone__init(&chunk[i]);
        chunk[i].model = info->model;
        chunk[i].form = info->form;
        chunk[i].index = info->index;
        chunk[i].generation = info->generation;
        pointer[i] = &chunk[i];
    }
    gone.n_chunks = notice->chunks;
    gone.chunks = pointer;
    message.body_case = OSCAR__V1__NOTICE__BODY_CHUNKS_GONE;
    message.chunks_gone = &gone;
    return oscar_wire_pack(&message.base, buffer, capacity, ret_bytes);
}

int oscar_notice_encode(const struct oscar_notice *notice, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    if (notice->chunks < 1 || notice->chunks > OSCAR_MAX_RECORD_FDS)
        return OSCAR_ERR_INVALID;
    switch (notice->kind) {
    case OSCAR_NOTICE_CHUNKS:
        return encode_chunks(notice, buffer, capacity, ret_bytes);
    case OSCAR_NOTICE_CHUNKS_GONE:
        return encode_chunks_gone(notice, buffer, capacity, ret_bytes);
    default:
        return OSCAR_ERR_INVALID;
    }
}

/* All checks come before the first write: a notice is 8 KiB, too large to build twice. */
static int take_chunks(const Oscar__V1__ChunksNotice *chunks, struct oscar_notice *ret, struct oscar_cause *cause) {
    int r = check_count(chunks->n_chunks, cause);
    for (size_t i = 0; r == 0 && i < chunks->n_chunks; i++)
        r = check_form(chunks->chunks[i]->form, cause);
    if (r < 0)
        return r;
    ret->kind = OSCAR_NOTICE_CHUNKS;
    ret->chunks = (uint32_t)chunks->n_chunks;
    for (size_t i = 0; i < chunks->n_chunks; i++) {
        const Oscar__V1__ChunkInfo *chunk = chunks->chunks[i];
        ret->chunk[i] = (struct oscar_chunk_info){
            .model = chunk->model,
            .form = (enum oscar_form)chunk->form,
            .index = chunk->index,
            .generation = chunk->generation,
            .bytes = chunk->bytes,
            .writable = chunk->writable != 0,
        };
    }
    return OSCAR_OK;
}

static int take_chunks_gone(const Oscar__V1__ChunksGoneNotice *gone, struct oscar_notice *ret,
                            struct oscar_cause *cause) {
    int r = check_count(gone->n_chunks, cause);
    for (size_t i = 0; r == 0 && i < gone->n_chunks; i++)
        r = check_form(gone->chunks[i]->form, cause);
    if (r < 0)
        return r;
    ret->kind = OSCAR_NOTICE_CHUNKS_GONE;
    ret->chunks = (uint32_t)gone->n_chunks;
    for (size_t i = 0; i < gone->n_chunks; i++) {
        const Oscar__V1__ChunkGone *chunk = gone->chunks[i];
        ret->chunk[i] = (struct oscar_chunk_info){
            .model = chunk->model,
            .form = (enum oscar_form)chunk->form,
            .index = chunk->index,
            .generation = chunk->generation,
        };
    }
    return OSCAR_OK;
}

int oscar_notice_decode(const uint8_t *bytes, size_t size, struct oscar_notice *ret, struct oscar_cause *cause) {
    _Alignas(OSCAR_WIRE_ALIGNMENT) uint8_t memory[ARENA_BYTES];
    struct oscar_wire_arena arena;
    oscar_wire_arena_init(&arena, memory, sizeof(memory));
    const Oscar__V1__Notice *message =
        (const Oscar__V1__Notice *)oscar_wire_unpack(&arena, &oscar__v1__notice__descriptor, bytes, size);
    if (message == NULL)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "a notice of %zu bytes is malformed or too large", size);
    switch (message->body_case) {
    case OSCAR__V1__NOTICE__BODY_CHUNKS:
        return take_chunks(message->chunks, ret, cause);
    case OSCAR__V1__NOTICE__BODY_CHUNKS_GONE:
        return take_chunks_gone(message->chunks_gone, ret, cause);
    default:
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "a notice has no body that this version knows");
    }
}
