/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a fit takes of memory does not grow with the capture: it is that of one head of one sequence. The linker puts the functions
 * below in the place of malloc and its kin (--wrap). Captures are mapped, so that the kernel may drop what was read: they do not count.
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>

#include "calib/activations.h"
#include "calib/fit.h"
#include "calib/parallel.h"
#include "calib_fixture.h"

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__real_reallocarray(void *memory, size_t count, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void __real_free(void *memory);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);
void *__wrap_reallocarray(void *memory, size_t count, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void __wrap_free(void *memory);

static int64_t held, most; /* bytes; texts that libc allocates itself are given back without having been taken */

static void *take(void *memory) {
    held += (int64_t)malloc_usable_size(memory);
    most = held > most ? held : most;
    return memory;
}

static void *exchange(size_t before, void *memory) {
    if (memory != NULL)
        held -= (int64_t)before;
    return take(memory);
}

void *__wrap_malloc(size_t size) { return take(__real_malloc(size)); }
void *__wrap_calloc(size_t count, size_t size) { return take(__real_calloc(count, size)); }
void *__wrap_aligned_alloc(size_t alignment, size_t size) { return take(__real_aligned_alloc(alignment, size)); }

void *__wrap_realloc(void *memory, size_t size) {
    size_t before = malloc_usable_size(memory);
    return exchange(before, __real_realloc(memory, size));
}

void *__wrap_reallocarray(void *memory, size_t count, size_t size) {
    size_t before = malloc_usable_size(memory);
    return exchange(before, __real_reallocarray(memory, count, size));
}

void __wrap_free(void *memory) {
    held -= (int64_t)malloc_usable_size(memory);
    __real_free(memory);
}

#define TOKENS 448U
#define TIMES 4U           /* the larger captures are so much larger */
#define ROOM (128 * 1024L) /* for lists of layers, files and tensors */

/* The most that a fit holds at once of a capture of so many layers and sequences. */
static int64_t fit_peak(uint32_t layers, unsigned sequences) {
    const struct calib_model model = {
        .layers = layers, .query_heads = 2, .kv_heads = 1, .d = 64, .rope_base = 1e4, .bias = 6};
    const char *paths[TIMES];
    struct fit_options options = fit_defaults();
    struct activations *activations = NULL;
    struct oscar_cause cause = {0};
    options.threads = 1; /* each other thread holds a head of its own */
    options.context = TOKENS;
    for (unsigned i = 0; i < sequences; i++) {
        char name[32];
        (void)snprintf(name, sizeof(name), "%u-%u.safetensors", layers, i);
        paths[i] = calib_path(name);
        calib_write_capture(paths[i], &model,
                            &(struct calib_cut){.to = layers, .tokens = TOKENS, .type = OSCAR_TENSOR_F32});
    }
    int64_t before = most = held;
    int r = activations_open(paths, sequences, &activations, &cause);
    if (r == 0)
        r = fit_to_file(&options, activations, calib_path("fitted"), &cause);
    if (r < 0)
        fail_msg("%s", cause.text);
    activations_free(activations);
    printf("%u layers, %u sequences: %lld bytes\n", layers, sequences, (long long)(most - before));
    return most - before;
}

static void more_layers_take_no_more(void **unused) {
    (void)unused;
    int64_t one = fit_peak(1, 1);
    assert_true(one > (int64_t)TOKENS * 64 * 2 * 24); /* it was counted: K and V, and both once more as fp64 */
    assert_true(fit_peak(TIMES, 1) <= one + ROOM);
}

static void more_sequences_take_no_more(void **unused) {
    (void)unused;
    assert_true(fit_peak(1, TIMES) <= fit_peak(1, 1) + ROOM);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(more_layers_take_no_more),
        cmocka_unit_test(more_sequences_take_no_more),
    };
    calib_seed();
    parallel_quiet_blas();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
