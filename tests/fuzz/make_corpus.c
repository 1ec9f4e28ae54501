/* SPDX-License-Identifier: Apache-2.0 */
/* make_corpus DIRECTORY: writes the seeds in tests/fuzz/corpus whose form is binary: messages, records, files of tensors, files of PyTorch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "proto/calibration.h"
#include "proto/frame.h"
#include "tests/unit/calib_archive.h"
#include "tests/unit/proto_random.h"
#include "tests/unit/proto_tensor_file.h"

#define DIM 64U
#define PREFIX_NONE (-1)

static const char *root;

static void fail(const char *what) {
    perror(what);
    exit(EXIT_FAILURE);
}

/* A seed: `prefix`, if there is one, and the bytes. */
static void write_seed(const char *target, const char *name, int prefix, const void *bytes, size_t size) {
    char path[4096];
    (void)snprintf(path, sizeof(path), "%s/%s", root, target);
    (void)mkdir(path, 0777);
    (void)snprintf(path, sizeof(path), "%s/%s/%s", root, target, name);
    FILE *out = fopen(path, "wbe");
    if (out == NULL)
        fail(path);
    if (prefix != PREFIX_NONE)
        (void)fputc(prefix, out);
    (void)fwrite(bytes, 1, size, out);
    if (fclose(out) != 0)
        fail(path);
}

static void write_messages(void) {
    static uint8_t buffer[OSCAR_MAX_RECORD_PAYLOAD_BYTES];
    size_t bytes;
    for (enum oscar_verb verb = OSCAR_HELLO; verb < OSCAR_VERBS; verb++) {
        struct oscar_request request;
        struct oscar_reply reply;
        random_request(verb, false, &request);
        if (oscar_request_encode(&request, buffer, sizeof(buffer), &bytes) == 0)
            write_seed("fuzz_request", oscar_verb_name(verb), PREFIX_NONE, buffer, bytes);
        random_reply(verb, false, &reply);
        if (oscar_reply_encode(&reply, buffer, sizeof(buffer), &bytes) == 0)
            write_seed("fuzz_reply", oscar_verb_name(verb), 0, buffer, bytes);
    }
    static struct oscar_notice notice;
    random_notice(OSCAR_NOTICE_CHUNKS, false, &notice);
    notice.chunks = 2;
    if (oscar_notice_encode(&notice, buffer, sizeof(buffer), &bytes) == 0)
        write_seed("fuzz_reply", "chunks", 1, buffer, bytes);
    random_notice(OSCAR_NOTICE_CHUNKS_GONE, false, &notice);
    notice.chunks = 2;
    if (oscar_notice_encode(&notice, buffer, sizeof(buffer), &bytes) == 0)
        write_seed("fuzz_reply", "chunks_gone", 1, buffer, bytes);
}

static void write_admin(void) {
    static const char *const verbs[] = {"stats", "flush", "version", "snapshot"};
    for (enum oscar_admin_verb verb = OSCAR_ADMIN_STATS; verb <= OSCAR_ADMIN_SNAPSHOT; verb++) {
        struct oscar_admin_request request;
        struct oscar_admin_reply reply;
        uint8_t *buffer = NULL;
        size_t bytes;
        char name[32];
        random_admin_request(verb, &request);
        (void)snprintf(name, sizeof(name), "%s_request", verbs[verb - OSCAR_ADMIN_STATS]);
        if (oscar_admin_request_encode(&request, &buffer, &bytes) == 0)
            write_seed("fuzz_admin", name, 0, buffer, bytes);
        free(buffer);
        buffer = NULL;
        random_admin_reply(verb, false, &reply);
        reply.metrics = reply.metrics < 2 ? reply.metrics : 2;
        reply.events = reply.events < 2 ? reply.events : 2;
        (void)snprintf(name, sizeof(name), "%s_reply", verbs[verb - OSCAR_ADMIN_STATS]);
        if (oscar_admin_reply_encode(&reply, &buffer, &bytes) == 0)
            write_seed("fuzz_admin", name, 1, buffer, bytes);
        free(buffer);
        oscar_admin_reply_free(&reply);
    }
    static const char *const kinds[] = {"stored", "compressed", "removed", "cleared"};
    for (enum oscar_event_kind kind = OSCAR_EVENT_STORED; kind <= OSCAR_EVENT_CLEARED; kind++) {
        struct oscar_event event;
        uint8_t buffer[1024];
        size_t bytes;
        random_event(kind, false, &event);
        if (oscar_event_encode(&event, buffer, sizeof(buffer), &bytes) == 0)
            write_seed("fuzz_admin", kinds[kind - OSCAR_EVENT_STORED], 2, buffer, bytes);
    }
}

/* `how`: the bytes before the record, as fuzz_record reads them; then a record of `fds` descriptors. */
static void write_record(const char *name, enum oscar_record_kind kind, unsigned fds, const uint8_t *how,
                         size_t how_bytes) {
    uint8_t bytes[64] = {0};
    memcpy(bytes, how, how_bytes);
    oscar_record_header(bytes + how_bytes, kind, fds, 3);
    memcpy(bytes + how_bytes + OSCAR_RECORD_HEADER_BYTES, "abc", 3);
    write_seed("fuzz_record", name, PREFIX_NONE, bytes, how_bytes + OSCAR_RECORD_HEADER_BYTES + 3);
}

static void write_records(void) {
    write_record("request", OSCAR_RECORD_REQUEST, 0, (const uint8_t[]){0, 0, 0}, 3);
    write_record("reply_of_2", OSCAR_RECORD_REPLY, 2, (const uint8_t[]){0, 0, 1, 0, 2, 0}, 6);
    write_record("notice_of_200", OSCAR_RECORD_NOTICE, 200, (const uint8_t[]){0, 0, 2, 0, 150, 0, 0, 50, 0}, 9);
    write_record("control_cut", OSCAR_RECORD_REPLY, 2, (const uint8_t[]){2, 0, 2, 0, 1, 0, 1, 3, 2}, 9);
    write_record("end", OSCAR_RECORD_REPLY, 1, (const uint8_t[]){0, 255, 1, 0, 1, 0}, 6);
}

static void write_tensor_file(const char *target, const char *name, struct tensor_file *file) {
    size_t bytes;
    uint8_t *written = tensor_file_write(file, &bytes);
    write_seed(target, name, PREFIX_NONE, written, bytes);
    free(written);
    tensor_file_clear(file);
}

static void write_tensor_files(void) {
    static struct tensor_file file;
    static const char *const broken[][2] = {
        {"hole", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}"},
        {"overlap",
         "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"U8\",\"shape\":[8],"
         "\"data_offsets\":[0,8]}}"},
        {"overflow", "{\"a\":{\"dtype\":\"F64\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,8]}}"},
    };
    for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
        size_t bytes;
        uint8_t *raw = tensor_file_raw(broken[i][1], "12345678", 8, &bytes);
        write_seed("fuzz_safetensors", broken[i][0], PREFIX_NONE, raw, bytes);
        free(raw);
    }
    tensor_file_metadata(&file, "oscar.model", "m");
    for (enum oscar_tensor_type type = OSCAR_TENSOR_U8; type <= OSCAR_TENSOR_F64; type++)
        (void)tensor_file_add(&file, oscar_tensor_type_name(type), type, 2, (const uint64_t[]){2, type + 1});
    (void)tensor_file_add(&file, "scalar", OSCAR_TENSOR_F32, 0, NULL);
    (void)tensor_file_add(&file, "empty", OSCAR_TENSOR_F32, 2, (const uint64_t[]){0, 3});
    write_tensor_file("fuzz_safetensors", "every_type", &file);
}

static void begin_calibration(struct tensor_file *file, const char *rotation_k) {
    static const char *const metadata[][2] = {
        {"oscar.format", "1"},
        {"oscar.model", "m"},
        {"oscar.method", "n"},
        {"oscar.layers", "1"},
        {"oscar.kv_heads", "1"},
        {"oscar.head_dim", "64"},
        {"oscar.rotation_v", "hadamard"},
    };
    for (size_t i = 0; i < sizeof(metadata) / sizeof(metadata[0]); i++)
        tensor_file_metadata(file, metadata[i][0], metadata[i][1]);
    tensor_file_metadata(file, "oscar.rotation_k", rotation_k);
    *(int32_t *)tensor_file_add(file, "layers.0.k.rank", OSCAR_TENSOR_I32, 1, (const uint64_t[]){1}) = 61;
    *(int32_t *)tensor_file_add(file, "layers.0.v.rank", OSCAR_TENSOR_I32, 1, (const uint64_t[]){1}) = 58;
}

static void add_unit_matrix(struct tensor_file *file, const char *name) {
    float *matrix = tensor_file_add(file, name, OSCAR_TENSOR_F32, 3, (const uint64_t[]){1, DIM, DIM});
    for (size_t i = 0; i < DIM; i++)
        matrix[i * DIM + i] = 1.0F;
}

static void add_centre(struct tensor_file *file, uint64_t pairs) {
    float *centre = tensor_file_add(file, "layers.0.k.centre.static", OSCAR_TENSOR_F32, 2, (const uint64_t[]){1, DIM});
    centre[0] = 1.5F;
    if (pairs == 0)
        return;
    double *omega = tensor_file_add(file, "rope.omega", OSCAR_TENSOR_F64, 1, (const uint64_t[]){pairs});
    (void)tensor_file_add(file, "layers.0.k.centre.cos", OSCAR_TENSOR_F32, 3, (const uint64_t[]){1, pairs, DIM});
    (void)tensor_file_add(file, "layers.0.k.centre.sin", OSCAR_TENSOR_F32, 3, (const uint64_t[]){1, pairs, DIM});
    int32_t *pair = tensor_file_add(file, "layers.0.k.centre.pair", OSCAR_TENSOR_I32, 2, (const uint64_t[]){1, pairs});
    for (uint64_t i = 0; i < pairs; i++) {
        omega[i] = 1.0 / (double)(1 + i);
        pair[i] = (int32_t)(pairs - 1 - i);
    }
}

static void write_calibrations(void) {
    static struct tensor_file file;
    begin_calibration(&file, "hadamard");
    write_tensor_file("fuzz_calibration", "hadamard", &file);
    begin_calibration(&file, "hadamard");
    add_centre(&file, 0);
    write_tensor_file("fuzz_calibration", "centre", &file);
    begin_calibration(&file, "hadamard");
    add_centre(&file, 2);
    write_tensor_file("fuzz_calibration", "turning_centre", &file);
    begin_calibration(&file, "matrix");
    add_unit_matrix(&file, "layers.0.k.rotation");
    write_tensor_file("fuzz_calibration", "matrix", &file);
    begin_calibration(&file, "hadamard");
    add_unit_matrix(&file, "layers.0.k.feedback");
    write_tensor_file("fuzz_calibration", "feedback", &file);
}

static void write_torch_files(void) {
    static const float rotations[2 * 2 * 16] = {[0] = 1.0F, [5] = 1.0F, [10] = 1.0F, [15] = -1.0F};
    static const struct {
        const char *name;
        struct rotation_file file;
    } files[] = {
        {"format_1", {.layers = 2, .d = 4, .rotations = rotations, .model = "m", .kv_heads = 2}},
        {"format_2",
         {.layers = 2, .d = 4, .rotations = rotations, .heads = 2, .storage = "HalfStorage", .text_keys = true}},
        {"views", {.layers = 2, .d = 4, .rotations = rotations, .heads = 2, .transposed = true, .shared = true}},
        {"protocol_4", {.layers = 1, .d = 4, .rotations = rotations, .storage = "DoubleStorage", .protocol_4 = true}},
        {"zip64", {.layers = 1, .d = 4, .rotations = rotations, .storage = "BFloat16Storage", .wide = true}},
    };
    static const char call[] = "\x80\2cos\nsystem\nX\2\0\0\0ls\x85R.";
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        struct bytes pickle = {0}, file;
        rotation_file_pickle(&files[i].file, &pickle);
        write_seed("fuzz_pickle", files[i].name, PREFIX_NONE, pickle.at, pickle.size);
        rotation_file_write(&files[i].file, &file);
        write_seed("fuzz_torch", files[i].name, PREFIX_NONE, file.at, file.size);
        bytes_clear(&pickle);
        bytes_clear(&file);
    }
    write_seed("fuzz_pickle", "call", PREFIX_NONE, call, sizeof(call) - 1);
}

int main(int argc, char *argv[]) {
    if (argc != 2) {
        (void)fprintf(stderr, "usage: make_corpus DIRECTORY\n");
        return EXIT_FAILURE;
    }
    root = argv[1];
    if (setenv("OSCAR_TEST_SEED", "1", 1) != 0)
        fail("setenv");
    random_seed();
    write_messages();
    write_admin();
    write_records();
    write_tensor_files();
    write_calibrations();
    write_torch_files();
    return EXIT_SUCCESS;
}
