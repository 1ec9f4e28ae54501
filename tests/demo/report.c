/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/demo/report.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#define WORKERS 3U

/*
 * Bounds of relative errors ||out - exact|| / ||exact|| of an output row.
 *
 * BF16 has 8 significant bits: rotated K and V, and the output, are each rounded by up to 2^-9 of an element. K's part goes
 * through the softmax, which turns it into up to 1.2 % of a row of this capture.
 */
#define DENSE_ERROR_BOUND 0.03
/*
 * The default calibration is data-free (Hadamard, no centre, nearest rounding). With it two bits err by 6 to 13 % of a row in the
 * mean, by layer; a worker that joins over a packed recent window sees more. A row whose exact output is much shorter than the V rows
 * that it is made of may err by more than its own length, 3 times in the worst of this capture. A wrong page, or a right one read
 * wrong, is off by 1 in the mean. A fitted calibration errs by less than half of that.
 */
#define INT2_MEAN_ERROR_BOUND 0.3
#define INT2_MAX_ERROR_BOUND 10.0
#define FITTED_PART_OF_HADAMARDS_ERROR 0.5
/* 2-bit codes and four binary16 a token, head size 64: (2 * 64 * 2 + 64) / 128 = 2.5; and the padding of a page on a GPU. */
#define PACKED_BITS_BOUND 2.6

static const char *const segment_text[SEGMENTS] = {
    [ALL_DENSE] = "all workers, everything in BF16", [A_PREFILL] = "A, prefill over INT2 history",
    [A_DECODE] = "A, decode over INT2 history",      [B_DECODE] = "B, decode over A's prefix",
    [B_AFTER_KILL] = "B, after A's death",           [C_JOINED] = "C, joined after A's death",
};

struct figures {
    int64_t dense_page_bytes, packed_page_bytes; /* of one page, all layers and heads */
    int64_t logical_pages, stored_pages;
    int64_t private_bytes; /* BF16, each worker on its own */
    int64_t stored_bytes;
    double dedup_ratio, packed_bits, mean, max, dense_max, attach_p50;
    bool survived;
};

static double mean_of(const struct segment *segment) {
    return segment->rows > 0 ? segment->sum / (double)segment->rows : 0;
}

static void add_up(const struct scene *scene, double *ret_mean, double *ret_max) {
    struct segment all = {0, 0, 0};
    for (unsigned i = ALL_DENSE + 1; i < SEGMENTS; i++) {
        all.rows += scene->segment[i].rows;
        all.sum += scene->segment[i].sum;
        if (scene->segment[i].max > all.max)
            all.max = scene->segment[i].max;
    }
    *ret_mean = mean_of(&all);
    *ret_max = all.max;
}

static bool right(const struct segment *segment) {
    return segment->rows > 0 && mean_of(segment) <= INT2_MEAN_ERROR_BOUND && segment->max <= INT2_MAX_ERROR_BOUND;
}

static struct figures figures_of(const struct scene *scene) {
    struct figures f = {0};
    int64_t elements = scene->dense_page_bytes / 2; /* of a page: K and V, all layers and heads */
    f.dense_page_bytes = scene->dense_page_bytes;
    f.stored_pages = scene->pages_sink + scene->pages_dense + scene->pages_packed;
    f.stored_bytes = scene->bytes_used;
    f.packed_page_bytes = scene->pages_packed > 0 ? scene->bytes_packed / scene->pages_packed : 0;
    /* A counts with the pages that outlived it, so that its lost tail flatters nobody. */
    f.logical_pages = (int64_t)PAGES(A_SEALED_TOKENS) + (int64_t)PAGES(B_ENDS_AT) + (int64_t)PAGES(C_ENDS_AT);
    f.private_bytes = f.logical_pages * f.dense_page_bytes;
    f.dedup_ratio = f.stored_pages > 0 ? (double)f.logical_pages / (double)f.stored_pages : 0;
    f.packed_bits = (double)f.packed_page_bytes * 8 / (double)elements;
    add_up(scene, &f.mean, &f.max);
    f.dense_max = scene->segment[ALL_DENSE].max;
    f.attach_p50 = (scene->attach_us[(ATTACHES - 1) / 2] + scene->attach_us[ATTACHES / 2]) / 2;
    f.survived = scene->a_was_killed && scene->b_survived && scene->c_survived && scene->b_steps_after_kill > 0 &&
                 right(&scene->segment[B_AFTER_KILL]) && right(&scene->segment[C_JOINED]);
    return f;
}

static int64_t leaked_bytes(const struct result *result) {
    return result->fitted.leaked_bytes + result->hadamard.leaked_bytes;
}

static void print_sharing(const struct scene *scene, const struct figures *f) {
    printf("What was shared\n"
           "  A stored %u tokens and went on to %u; its cache hit was %u tokens.\n"
           "  B opened the same %u tokens: hit %u, %u of them already INT2; then its own text up to %u.\n"
           "  C opened %u tokens of A's text when A was dead: hit %u, pages that A had generated among them; up to "
           "%u.\n\n",
           PREFIX_TOKENS, A_DECODES_TO, scene->a_hit, PREFIX_TOKENS, scene->b_hit, scene->b_hit_packed, B_ENDS_AT,
           C_PROMPT_TOKENS, scene->c_hit, C_ENDS_AT);
    printf("Bytes\n"
           "  as private BF16 caches   %9" PRId64 "  (A %" PRId64 ", B %" PRId64 ", C %" PRId64
           ": full pages that each used)\n"
           "  stored by oscard         %9" PRId64 "  (%" PRId64 " sink, %" PRId64 " dense and %" PRId64
           " INT2 pages): 1/%.1f\n"
           "  pages used / stored      %" PRId64 " / %" PRId64
           " = %.2f (dedup ratio: each worker's pages over the pages that exist)\n"
           "  bits an element          %.2f in INT2 pages, %.2f over everything stored\n\n",
           f->private_bytes, (int64_t)PAGES(A_SEALED_TOKENS) * f->dense_page_bytes,
           (int64_t)PAGES(B_ENDS_AT) * f->dense_page_bytes, (int64_t)PAGES(C_ENDS_AT) * f->dense_page_bytes,
           f->stored_bytes, scene->pages_sink, scene->pages_dense, scene->pages_packed,
           (double)f->private_bytes / (double)f->stored_bytes, f->logical_pages, f->stored_pages, f->dedup_ratio,
           f->packed_bits, (double)f->stored_bytes * 16 / (double)(f->stored_pages * f->dense_page_bytes));
}

static void print_comparison(const struct result *result, const struct figures *fitted,
                             const struct figures *hadamard) {
    printf("Relative error of output rows against exact float64 attention over the original K/V, by calibration\n"
           "  %-42s %20s  %20s\n"
           "  %-34s %7s %10s %9s  %10s %9s\n",
           "", "fitted to the model", "Hadamard (default)", "", "rows", "mean", "max", "mean", "max");
    for (unsigned i = 0; i < SEGMENTS; i++) {
        const struct segment *left = &result->fitted.segment[i], *right = &result->hadamard.segment[i];
        printf("  %-34s %7" PRIu64 " %10.5f %9.5f  %10.5f %9.5f\n", segment_text[i], left->rows, mean_of(left),
               left->max, mean_of(right), right->max);
    }
    printf("  %-42s %10.5f %9.5f  %10.5f %9.5f\n", "all that read INT2", fitted->mean, fitted->max, hadamard->mean,
           hadamard->max);
    printf("  %-42s %10.2f %21.2f\n", "bits an element in INT2 pages", fitted->packed_bits, hadamard->packed_bits);
    printf("  %-42s %10" PRId64 " %21" PRId64 "\n", "bytes stored", fitted->stored_bytes, hadamard->stored_bytes);
    printf("  %-42s %10" PRId64 " %21s\n", "bytes of the calibration file", result->calibration_bytes, "none");
    printf(
        "  Fitted: %s, made by oscar-calib on other text. Hadamard knows nothing of the model.\n"
        "  Errors over 1 are mostly of rows whose exact output is much shorter than the V rows that it is made of.\n\n",
        result->fitted.calibration);
}

void report_print(const struct result *result, const struct replay *replay) {
    const struct oscar_geometry *geometry = replay_geometry(replay);
    const struct scene *scene = &result->fitted;
    struct figures f = figures_of(scene), hadamard = figures_of(&result->hadamard);
    printf("oscard demo: %s, %u captured layers, %u query and %u KV heads of %u, backend %s, device %s\n\n",
           replay_model(replay), geometry->layers, geometry->query_heads, geometry->kv_heads, geometry->head_dim,
           scene->backend, scene->device);
    print_sharing(scene, &f);
    print_comparison(result, &f, &hadamard);
    printf("Time to attach (model and sequence open, %u tokens hit), median of %u: %.0f us; without a calibration file "
           "%.0f us\n\n",
           PREFIX_TOKENS, ATTACHES, f.attach_p50, hadamard.attach_p50);
    printf(
        "The kill\n"
        "  A died by SIGKILL at token %u, in the middle of a page, with half of its layers stored, while B was "
        "decoding.\n"
        "  The daemon had taken back what was A's alone %.0f ms later. B decoded %u more tokens and C joined: %s.\n\n",
        A_DECODES_TO, scene->kill_settled_ms, scene->b_steps_after_kill,
        f.survived ? "all outputs right" : "NOT ALL OUTPUTS RIGHT");
    printf("Left in use when all had gone and the cache was flushed: %" PRId64 " bytes\n\n", leaked_bytes(result));
    printf("oscarctl stats, before B and C left\n%s\n", scene->stats_table);
}

void report_print_json(const struct result *result) {
    const struct scene *scene = &result->fitted;
    struct figures f = figures_of(scene), hadamard = figures_of(&result->hadamard);
    json_t *line =
        json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:b, s:I, s:s, s:I}", /* */
                  "backend", scene->backend, "device", scene->device, "workers", (json_int_t)WORKERS, "prefix_tokens",
                  (json_int_t)PREFIX_TOKENS, "hit_tokens", (json_int_t)scene->b_hit, "bytes_bf16_private",
                  (json_int_t)f.private_bytes, "bytes_stored", (json_int_t)f.stored_bytes, "dedup_ratio", f.dedup_ratio,
                  "bits_per_element", f.packed_bits, "rel_err_mean", f.mean, "rel_err_max", f.max, "rel_err_dense_max",
                  f.dense_max, "attach_us_p50", f.attach_p50, "survived_kill", f.survived && hadamard.survived,
                  "leaked_bytes", (json_int_t)leaked_bytes(result), "calibration", scene->calibration,
                  "calibration_bytes", (json_int_t)result->calibration_bytes);
    json_t *beside =
        json_pack("{s:I, s:f, s:f, s:f, s:f, s:f}", "bytes_stored", (json_int_t)hadamard.stored_bytes,
                  "bits_per_element", hadamard.packed_bits, "rel_err_mean", hadamard.mean, "rel_err_max", hadamard.max,
                  "rel_err_dense_max", hadamard.dense_max, "attach_us_p50", hadamard.attach_p50);
    if (line != NULL && json_object_set_new(line, "hadamard", beside) == 0)
        json_dumpf(line, stdout, JSON_REAL_PRECISION(6));
    json_decref(line);
    printf("\n");
}

__attribute__((format(printf, 3, 4))) static void expect(bool *verdict, bool holds, const char *format, ...) {
    if (holds)
        return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "demo: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    *verdict = false;
}

static bool scene_verdict(const struct scene *scene) {
    struct figures f = figures_of(scene);
    bool verdict = true;
    expect(&verdict, scene->a_hit == 0, "A hit %u tokens in an empty cache", scene->a_hit);
    expect(&verdict, scene->b_hit == PREFIX_TOKENS, "B hit %u tokens instead of %u", scene->b_hit, PREFIX_TOKENS);
    expect(&verdict, scene->b_hit_packed > 0, "B's hit held no INT2 page");
    expect(&verdict, scene->c_hit == A_SEALED_TOKENS, "C hit %u tokens instead of %u", scene->c_hit, A_SEALED_TOKENS);
    expect(&verdict, scene->segment[ALL_DENSE].rows > 0 && f.dense_max <= DENSE_ERROR_BOUND,
           "a row over BF16 pages errs by %.4f, more than %.4f", f.dense_max, DENSE_ERROR_BOUND);
    for (unsigned i = ALL_DENSE + 1; i < SEGMENTS; i++)
        expect(&verdict, right(&scene->segment[i]), "%s: error mean %.4f, max %.4f; at most %.4f and %.4f are right",
               segment_text[i], mean_of(&scene->segment[i]), scene->segment[i].max, INT2_MEAN_ERROR_BOUND,
               INT2_MAX_ERROR_BOUND);
    expect(&verdict, f.stored_pages < f.logical_pages, "nothing was shared");
    expect(&verdict, f.packed_bits > 0 && f.packed_bits <= PACKED_BITS_BOUND, "INT2 pages take %.3f bits an element",
           f.packed_bits);
    expect(&verdict, scene->a_was_killed, "A was not killed");
    expect(&verdict, f.survived, "B or C did not survive A's death");
    expect(&verdict, scene->leaked_bytes == 0, "%" PRId64 " bytes leaked", scene->leaked_bytes);
    return verdict;
}

bool report_verdict(const struct result *result) {
    struct figures fitted = figures_of(&result->fitted), hadamard = figures_of(&result->hadamard);
    bool verdict = scene_verdict(&result->hadamard);
    verdict = scene_verdict(&result->fitted) && verdict;
    expect(&verdict, fitted.mean <= FITTED_PART_OF_HADAMARDS_ERROR * hadamard.mean,
           "with the fitted calibration rows err by %.4f in the mean, by Hadamard's %.4f: more than %.2f of it",
           fitted.mean, hadamard.mean, FITTED_PART_OF_HADAMARDS_ERROR);
    expect(&verdict, fitted.packed_bits == hadamard.packed_bits, "the fitted calibration takes %.3f bits an element",
           fitted.packed_bits);
    return verdict;
}
