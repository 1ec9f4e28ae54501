/* SPDX-License-Identifier: Apache-2.0 */
#include "calib_fixture.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "calib/tensor_writer.h"
#include "proto/half.h"

static uint64_t state, seed;

static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

static uint64_t next(uint64_t *at) { return mix(*at += UINT64_C(0x9e3779b97f4a7c15)); }

static double uniform(uint64_t *at) { return (double)(next(at) >> 11) * 0x1p-52 - 1.0; }

static double normal(uint64_t *at) {
    double sum = 0;
    for (unsigned i = 0; i < 12; i++)
        sum += uniform(at);
    return sum / 2;
}

void calib_seed(void) {
    const char *given = getenv("OSCAR_TEST_SEED");
    seed = given != NULL ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    state = seed;
    printf("OSCAR_TEST_SEED=%llu\n", (unsigned long long)seed);
}

double calib_uniform(void) { return uniform(&state); }
double calib_normal(void) { return normal(&state); }

/* --- files -------------------------------------------------------------------------------------------------------- */

static char folder[64];

static void remove_tree(const char *path) {
    DIR *entries = opendir(path);
    for (struct dirent *entry; entries != NULL && (entry = readdir(entries)) != NULL;) {
        char name[512];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        (void)snprintf(name, sizeof(name), "%s/%s", path, entry->d_name);
        if (unlink(name) != 0)
            remove_tree(name);
    }
    if (entries != NULL)
        (void)closedir(entries);
    (void)rmdir(path);
}

static void remove_folder(void) { remove_tree(folder); }

const char *calib_folder(void) {
    if (folder[0] == '\0') {
        (void)snprintf(folder, sizeof(folder), "/tmp/oscar-calib-test.XXXXXX");
        assert_non_null(mkdtemp(folder));
        assert_int_equal(atexit(remove_folder), 0);
    }
    return folder;
}

const char *calib_path(const char *name) {
    static char paths[64][192];
    static unsigned turn;
    char *path = paths[turn++ % 64];
    (void)snprintf(path, sizeof(paths[0]), "%s/%s", calib_folder(), name);
    return path;
}

/* --- the made-up model -------------------------------------------------------------------------------------------- */

static uint64_t row_state(uint32_t layer, char part, uint64_t position, uint32_t head) {
    return mix(mix(mix(seed + layer) + (uint64_t)part) + head) + mix(position);
}

void calib_row(const struct calib_model *model, uint32_t layer, char part, uint64_t position, uint32_t head,
               float *ret) {
    const uint32_t d = model->d;
    uint64_t fixed = row_state(layer, part, UINT64_MAX, head); /* what all rows of the head share */
    uint64_t at = row_state(layer, part, position, head);
    double x[256];
    double common = normal(&at);
    for (uint32_t i = 0; i < d; i++) {
        double bias = uniform(&fixed);
        double spread = part == 'k' ? 1.0 : exp(1.5 * uniform(&fixed)); /* dims of different size, and correlated */
        x[i] = spread * (normal(&at) + (part == 'k' ? 0 : common * uniform(&fixed)));
        if (part == 'k')
            x[i] += model->bias * bias;
    }
    for (uint32_t i = 0; part == 'k' && i < d / 2; i++) {
        double angle = pow(model->rope_base, -2.0 * i / d) * (double)position;
        double a = x[i] * cos(angle) - x[i + d / 2] * sin(angle);
        x[i + d / 2] = x[i] * sin(angle) + x[i + d / 2] * cos(angle);
        x[i] = a;
    }
    for (uint32_t i = 0; i < d; i++)
        ret[i] = oscar_float_from_bfloat(oscar_bfloat_from_float((float)x[i])); /* the same in each type */
}

static void put(enum oscar_tensor_type type, float value, uint8_t *to) {
    uint16_t narrow = type == OSCAR_TENSOR_F16 ? oscar_half_from_float(value) : oscar_bfloat_from_float(value);
    if (type == OSCAR_TENSOR_F32)
        memcpy(to, &value, sizeof(value));
    else
        memcpy(to, &narrow, sizeof(narrow));
}

void calib_write_capture(const char *path, const struct calib_model *model, const struct calib_cut *cut) {
    static const char parts[] = "qkv";
    struct oscar_cause cause = {0};
    struct tensor_writer *writer = NULL;
    uint8_t *data[512];
    size_t count = 0;
    const uint32_t width = oscar_tensor_type_bytes(cut->type);
    assert_int_equal(tensor_writer_new(&writer, &cause), 0);
    tensor_writer_metadata(writer, "model", "made \"up\"");
    tensor_writer_metadata(writer, "model_layers", "%u", model->layers);
    tensor_writer_metadata(writer, "first_position", "%llu", (unsigned long long)cut->first);
    if (!cut->no_rope) {
        tensor_writer_metadata(writer, "rope_base", "%g", model->rope_base);
        tensor_writer_metadata(writer, "rope_pairs", "halves");
    }
    for (uint32_t layer = cut->from; layer < cut->to; layer++)
        for (const char *part = parts; *part != '\0'; part++) {
            const uint32_t heads = *part == 'q' ? model->query_heads : model->kv_heads;
            uint8_t *to = malloc(cut->tokens * heads * model->d * width + 1);
            char name[32];
            assert_non_null(to);
            assert_true(count < 512);
            data[count++] = to;
            for (uint64_t token = 0; token < cut->tokens; token++)
                for (uint32_t head = 0; head < heads; head++) {
                    float row[256];
                    calib_row(model, layer, *part, cut->first + token, head, row);
                    if (cut->change != NULL)
                        cut->change(row, layer, *part, cut->first + token, head, model->d);
                    for (uint32_t i = 0; i < model->d; i++)
                        put(cut->type, row[i], to + ((token * heads + head) * model->d + i) * width);
                }
            (void)snprintf(name, sizeof(name), "layers.%u.%c", layer, *part);
            if (cut->no_tensor == NULL || strcmp(cut->no_tensor, name) != 0)
                tensor_writer_add(writer, name, cut->type, 3, (uint64_t[]){cut->tokens, heads, model->d}, to);
        }
    if (tensor_writer_save(writer, path, &cause) != 0)
        fail_msg("%s", cause.text);
    tensor_writer_free(writer);
    while (count > 0)
        free(data[--count]);
}
