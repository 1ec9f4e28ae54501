/* SPDX-License-Identifier: Apache-2.0 */
/* oscar-calib inspect and verify: what a calibration file holds, and whether every number of it is good. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "calib/calibration_file.h"
#include "calib/options.h"
#include "calib/print.h"
#include "proto/safetensors.h"

static const char *const keys[] = {
    "oscar.model",
    "oscar.method",
    "oscar.layers",
    "oscar.kv_heads",
    "oscar.head_dim",
    "oscar.rotation_k",
    "oscar.rotation_v",
    "oscar.targets",
    "oscar.clip",
    "oscar.lambda",
    "oscar.held_out_error.matrix",
    "oscar.held_out_error.hadamard",
    "oscar.samples",
    "oscar.positions",
    "oscar.context",
    "oscar.source_layers",
    "oscar.sources",
    "oscar.date",
};

static void digest_line(const struct oscar_calibration *calibration, char ret[2 * OSCAR_DIGEST_BYTES + 1]) {
    oscar_digest_hex(&calibration->digest, ret);
}

/* The most pairs, and the least and the greatest rank of a side, over the heads of a layer. */
struct layer_line {
    uint32_t pairs, k_least, k_most, v_least, v_most;
    bool centre, feedback;
};

static struct layer_line describe(const struct oscar_calibration *calibration, uint32_t layer) {
    struct layer_line line = {.k_least = UINT32_MAX, .v_least = UINT32_MAX};
    for (uint32_t h = 0; h < calibration->kv_heads; h++) {
        const struct oscar_head_calibration *head = oscar_calibration_head(calibration, layer, h);
        line.pairs = head->pairs > line.pairs ? head->pairs : line.pairs;
        line.k_least = head->rank_k < line.k_least ? head->rank_k : line.k_least;
        line.k_most = head->rank_k > line.k_most ? head->rank_k : line.k_most;
        line.v_least = head->rank_v < line.v_least ? head->rank_v : line.v_least;
        line.v_most = head->rank_v > line.v_most ? head->rank_v : line.v_most;
        line.centre = line.centre || head->centre_static != NULL;
        line.feedback = line.feedback || head->feedback != NULL;
    }
    return line;
}

static void print_text(const struct calibration_file *file) {
    const struct oscar_calibration *calibration = file->calibration;
    char digest[2 * OSCAR_DIGEST_BYTES + 1];
    digest_line(calibration, digest);
    printf("%-32s %s\n", "digest", digest);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        const char *value = oscar_safetensors_metadata(calibration->file, keys[i]);
        if (value == NULL)
            continue;
        printf("%-32s ", keys[i] + strlen("oscar."));
        print_text_block(value, 33);
    }
    printf("\nlayer  centre        K rounding  rank K  rank V\n");
    for (uint32_t i = 0; i < calibration->layers; i++) {
        struct layer_line line = describe(calibration, i);
        char centre[16] = "none";
        if (line.centre)
            (void)snprintf(centre, sizeof(centre), line.pairs > 0 ? "%" PRIu32 " pairs" : "constant", line.pairs);
        printf("%5" PRIu32 "  %-12s  %-10s  ", i, centre, line.feedback ? "feedback" : "nearest");
        if (line.k_least == line.k_most && line.v_least == line.v_most)
            printf("%6" PRIu32 "  %6" PRIu32 "\n", line.k_least, line.v_least);
        else
            printf("%3" PRIu32 "-%" PRIu32 "  %3" PRIu32 "-%" PRIu32 "\n", line.k_least, line.k_most, line.v_least,
                   line.v_most);
    }
}

static void print_json(const struct calibration_file *file) {
    const struct oscar_calibration *calibration = file->calibration;
    char digest[2 * OSCAR_DIGEST_BYTES + 1];
    digest_line(calibration, digest);
    printf("{\"digest\":\"%s\"", digest);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        const char *value = oscar_safetensors_metadata(calibration->file, keys[i]);
        if (value == NULL)
            continue;
        printf(",\"%s\":", keys[i] + strlen("oscar."));
        print_json_string(stdout, value);
    }
    printf("}\n");
    for (uint32_t i = 0; i < calibration->layers; i++) {
        struct layer_line line = describe(calibration, i);
        printf("{\"layer\":%" PRIu32 ",\"centre\":%s,\"pairs\":%" PRIu32 ",\"rounding\":\"%s\",\"rank_k\":[%" PRIu32
               ",%" PRIu32 "],\"rank_v\":[%" PRIu32 ",%" PRIu32 "]}\n",
               i, line.centre ? "true" : "false", line.pairs, line.feedback ? "feedback" : "nearest", line.k_least,
               line.k_most, line.v_least, line.v_most);
    }
}

int calib_inspect(const struct calib_options *options, struct oscar_cause *cause) {
    struct calibration_file file = {0};
    int r = calibration_file_open(options->arguments[0], false, &file, cause);
    if (r < 0)
        return r;
    if (options->json)
        print_json(&file);
    else
        print_text(&file);
    calibration_file_close(&file);
    return 0;
}

int calib_verify(const struct calib_options *options, struct oscar_cause *cause) {
    struct calibration_file file = {0};
    char digest[2 * OSCAR_DIGEST_BYTES + 1];
    int r = calibration_file_open(options->arguments[0], true, &file, cause);
    if (r < 0)
        return r;
    digest_line(file.calibration, digest);
    printf("%s  %s: %" PRIu32 " layers, %" PRIu32 " KV heads, head size %" PRIu32
           ": complete, finite, orthogonal, triangular\n",
           digest, options->arguments[0], file.calibration->layers, file.calibration->kv_heads,
           file.calibration->head_dim);
    calibration_file_close(&file);
    return 0;
}
