/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/tensor_writer.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "calib/print.h"
#include "proto/cleanup.h"

struct blob {
    const void *data;
    uint64_t bytes;
};

/* A text that grows. */
struct text {
    FILE *stream;
    char *bytes;
    size_t size;
};

struct tensor_writer {
    struct text metadata, tensors; /* JSON: the members of __metadata__, and of the header */
    struct blob *blobs;
    size_t blob_count;
    uint64_t data_bytes;
    bool out_of_memory;
};

static bool text_open(struct text *text) {
    text->stream = open_memstream(&text->bytes, &text->size);
    return text->stream != NULL;
}

static void text_close(struct text *text) {
    if (text->stream != NULL)
        (void)fclose(text->stream);
    free(text->bytes);
}

void tensor_writer_free(struct tensor_writer *writer) {
    if (writer == NULL)
        return;
    text_close(&writer->metadata);
    text_close(&writer->tensors);
    free(writer->blobs);
    free(writer);
}

void tensor_writer_cleanup(struct tensor_writer **writer) { tensor_writer_free(*writer); }

int tensor_writer_new(struct tensor_writer **ret, struct oscar_cause *cause) {
    _cleanup_(tensor_writer_cleanup) struct tensor_writer *writer = calloc(1, sizeof(*writer));
    if (writer == NULL || !text_open(&writer->metadata) || !text_open(&writer->tensors))
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory to write a file");
    *ret = TAKE_PTR(writer);
    return 0;
}

void tensor_writer_metadata(struct tensor_writer *writer, const char *key, const char *format, ...) {
    _cleanup_free_ char *value = NULL;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&value, format, arguments);
    va_end(arguments);
    if (length < 0) {
        value = NULL;
        writer->out_of_memory = true;
        return;
    }
    FILE *stream = writer->metadata.stream;
    if (ftell(stream) > 0)
        (void)fputc(',', stream);
    print_json_string(stream, key);
    (void)fputc(':', stream);
    print_json_string(stream, value);
}

void tensor_writer_add(struct tensor_writer *writer, const char *name, enum oscar_tensor_type type, uint32_t dims,
                       const uint64_t *shape, const void *data) {
    struct blob *blobs = reallocarray(writer->blobs, writer->blob_count + 1, sizeof(*blobs));
    if (blobs == NULL) {
        writer->out_of_memory = true;
        return;
    }
    uint64_t bytes = oscar_tensor_type_bytes(type);
    assert(writer->data_bytes % bytes == 0);
    FILE *stream = writer->tensors.stream;
    (void)fputc(',', stream);
    print_json_string(stream, name);
    (void)fprintf(stream, ":{\"dtype\":\"%s\",\"shape\":[", oscar_tensor_type_name(type));
    for (uint32_t i = 0; i < dims; i++) {
        (void)fprintf(stream, "%s%" PRIu64, i == 0 ? "" : ",", shape[i]);
        bytes *= shape[i];
    }
    (void)fprintf(stream, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", writer->data_bytes,
                  writer->data_bytes + bytes);
    blobs[writer->blob_count++] = (struct blob){data, bytes};
    writer->blobs = blobs;
    writer->data_bytes += bytes;
}

static bool write_file(const struct tensor_writer *writer, int fd) {
    FILE *file = fdopen(dup(fd), "w");
    if (file == NULL)
        return false;
    static const char begin[] = "{\"__metadata__\":{";
    uint64_t length = sizeof(begin) - 1 + writer->metadata.size + 1 + writer->tensors.size + 1;
    uint64_t padding = (8 - length % 8) % 8;
    length += padding;
    uint8_t prefix[8];
    for (unsigned i = 0; i < 8; i++)
        prefix[i] = (uint8_t)(length >> (8 * i));
    (void)fwrite(prefix, 1, sizeof(prefix), file);
    (void)fprintf(file, "%s%s}%s}%*s", begin, writer->metadata.bytes, writer->tensors.bytes, (int)padding, "");
    for (size_t i = 0; i < writer->blob_count; i++)
        (void)fwrite(writer->blobs[i].data, 1, writer->blobs[i].bytes, file);
    bool good = fflush(file) == 0 && ferror(file) == 0 && fsync(fd) == 0;
    return fclose(file) == 0 && good;
}

int tensor_writer_save(struct tensor_writer *writer, const char *path, struct oscar_cause *cause) {
    bool good = fflush(writer->metadata.stream) == 0 && fflush(writer->tensors.stream) == 0;
    if (!good || writer->out_of_memory || ferror(writer->metadata.stream) != 0 || ferror(writer->tensors.stream) != 0)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory to write %s", path);
    _cleanup_free_ char *temporary = NULL;
    if (asprintf(&temporary, "%s.XXXXXX", path) < 0) {
        temporary = NULL;
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory to write %s", path);
    }
    _cleanup_close_ int fd = mkstemp(temporary);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot write %s: %m", path);
    if (fchmod(fd, 0644) == 0 && write_file(writer, fd) && rename(temporary, path) == 0)
        return 0;
    int r = oscar_fail(cause, OSCAR_ERR_IO, "cannot write %s: %m", path);
    (void)unlink(temporary);
    return r;
}
