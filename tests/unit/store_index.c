/* SPDX-License-Identifier: Apache-2.0 */
/* What the store is made of: the hash index, the eviction order, metadata, the shapes of arenas, the worker pool. */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "daemon/store/metrics.h"
#include "tests/support/store_rig.h"

#define PAGE OSCAR_PAGE_TOKENS
#define NODES 20000U

static uint64_t next_random(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 20;
}

static bool in_table(const struct table *table, const struct node *nodes, uint32_t node) {
    struct table_scan scan;
    uint32_t found;
    table_scan_begin(table, nodes[node].chain, &scan);
    while ((found = table_scan_next(table, nodes[node].chain, &scan)) != NODE_NONE)
        if (found == node)
            return true;
    return false;
}

static void the_index_finds_what_is_in_it_while_it_grows(void **state) {
    (void)state;
    /* Few distinct hashes make long runs; many make none. */
    for (uint64_t hashes = 16; hashes <= UINT64_C(1) << 40; hashes <<= 12) {
        struct table table;
        struct node *nodes = calloc(NODES, sizeof *nodes);
        bool *present = calloc(NODES, sizeof *present);
        uint64_t random = hashes;
        uint32_t count = hashes == 16 ? 600 : NODES;
        assert_int_equal(table_open(&table, NULL), 0);
        for (uint32_t i = 0; i < count; i++)
            nodes[i].chain = next_random(&random) % hashes * UINT64_C(0x9e3779b97f4a7c15);
        for (uint32_t step = 0; step < 4 * count; step++) {
            uint32_t node = (uint32_t)(next_random(&random) % count);
            assert_int_equal(in_table(&table, nodes, node), present[node]);
            if (present[node]) {
                if (next_random(&random) % 4 == 0) {
                    table_remove(&table, nodes, node);
                    present[node] = false;
                }
            } else {
                assert_int_equal(table_reserve(&table, NULL), 0);
                table_insert(&table, nodes, node);
                present[node] = true;
            }
        }
        uint32_t live = 0;
        for (uint32_t i = 0; i < count; i++) {
            assert_int_equal(in_table(&table, nodes, i), present[i]);
            live += present[i];
        }
        assert_int_equal(table.now.used + table.old.used, live);
        table_close(&table);
        free(nodes);
        free(present);
    }
}

static void the_eviction_order_gives_the_longest_unused_first(void **state) {
    (void)state;
    struct heap heap = {0};
    struct node *nodes = calloc(1000, sizeof *nodes);
    uint64_t random = 1;
    assert_int_equal(heap_reserve(&heap, 1000, NULL), 0);
    for (uint32_t i = 0; i < 1000; i++) {
        nodes[i].last_used = next_random(&random) % 500;
        heap_insert(&heap, nodes, i);
    }
    for (uint32_t i = 0; i < 1000; i += 3)
        heap_remove(&heap, nodes, i);
    for (uint32_t i = 1; i < 1000; i += 3) {
        nodes[i].last_used = next_random(&random) % 500;
        heap_update(&heap, nodes, i);
    }
    uint64_t last = 0;
    while (heap.count > 0) {
        uint32_t node = heap.node[0];
        assert_true(nodes[node].last_used >= last);
        last = nodes[node].last_used;
        heap_remove(&heap, nodes, node);
    }
    heap_close(&heap);
    free(nodes);
}

static void chunks_fall_on_the_devices_granularity(void **state) {
    (void)state;
    struct oscar_device device;
    fake_device_init(&device);
    for (device.granularity = 4096; device.granularity <= 2U << 20; device.granularity *= 8) {
        const struct memory_options options = {.ops = fake_device_ops(),
                                               .device = &device,
                                               .budget_bytes = UINT64_C(8) << 30,
                                               .packed_chunk_bytes = 64U << 20};
        struct memory memory;
        memory_open(&memory, &options);
        for (uint32_t records = 1; records < 600; records += 7)
            for (uint32_t head_dim = 64; head_dim <= 256; head_dim *= 2) {
                uint64_t page = records * (32 * head_dim + 512);
                struct arena_shape shape;
                assert_int_equal(arena_shape_for(&memory, OSCAR_FORM_PACKED, page, &shape, NULL), 0);
                assert_int_equal(shape.stride * shape.chunk_pages % device.granularity, 0);
                assert_true(shape.stride >= page);
                assert_true(shape.stride - page <= page / 16 || shape.chunk_pages < 64);
                assert_true(shape.stride * shape.chunk_pages <= options.packed_chunk_bytes + device.granularity);
                assert_true(shape.max_chunks * shape.stride * shape.chunk_pages <= options.budget_bytes);
            }
        struct arena_shape shape;
        assert_int_equal(arena_shape_for(&memory, OSCAR_FORM_PACKED, UINT64_C(1) << 31, &shape, NULL), 0);
        assert_int_equal(shape.chunk_pages, 1);
        assert_int_equal(arena_shape_for(&memory, OSCAR_FORM_PACKED, UINT64_C(9) << 30, &shape, NULL),
                         OSCAR_ERR_NO_SPACE);
    }
    fake_device_fini(&device);
}

static void metadata_takes_less_than_500_bytes_a_page(void **state) {
    (void)state;
    struct rig rig;
    rig_open(&rig, &(struct rig_options){.budget_pages = 16384, .chunk_pages = 64});
    rig.verify = false;
    struct rig_client *client = rig_client_new(&rig, "g");
    uint32_t *tokens = malloc(1000 * PAGE * sizeof *tokens);
    for (uint32_t seed = 0; seed < 16; seed++) {
        rig_tokens(seed, 0, 1000 * PAGE, tokens);
        struct rig_seq *seq = NULL;
        assert_int_equal(rig_seq_open(client, tokens, 1000 * PAGE, false, &seq), 0);
        for (uint32_t page = 0; page < 1000; page += 50)
            assert_int_equal(rig_seq_compute(seq, tokens + page * PAGE, 50 * PAGE), 0);
        rig_seq_close(seq, true);
        rig_settle(&rig);
        rig.events = 0;
    }
    rig.verify = true;
    rig_verify(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages_evicted_total", ""), 0);
    assert_true(rig_metric(&rig, "oscar_metadata_bytes", "") < 16000 * 500);
    for (uint32_t seed = 0; seed < 16; seed++) {
        rig_tokens(seed, 0, 1000 * PAGE, tokens);
        assert_int_equal(rig_probe(client, tokens, 1000 * PAGE), 1000 * PAGE);
    }
    free(tokens);
    rig_client_free(client);
    rig_close(&rig);
}

static void every_metric_has_a_name_a_unit_and_a_help_of_its_own(void **state) {
    (void)state;
    for (uint32_t i = 0; i < store_metric_count; i++) {
        const struct store_metric *metric = &store_metric_table[i];
        assert_true(strncmp(metric->name, "oscar_", 6) == 0 && metric->unit[0] && metric->help[0]);
        assert_true(strlen(metric->name) < OSCAR_NAME_BYTES && strlen(metric->help) < OSCAR_NAME_BYTES &&
                    strlen(metric->unit) < 32);
        size_t length = strlen(metric->name);
        assert_int_equal(metric->counter, length > 6 && strcmp(metric->name + length - 6, "_total") == 0);
        for (uint32_t k = 0; k < i; k++)
            assert_false(strcmp(metric->name, store_metric_table[k].name) == 0 &&
                         strcmp(metric->labels, store_metric_table[k].labels) == 0);
    }
}

struct counting_job {
    struct pool_job job;
    _Atomic uint32_t *sum;
    uint32_t value;
};

static void count(struct pool_job *job, void *context) {
    (void)context;
    struct counting_job *counting = (struct counting_job *)job;
    *counting->sum += counting->value;
}

static void the_pool_runs_every_job_once_and_gives_it_back(void **state) {
    (void)state;
    static struct counting_job jobs[1000];
    _Atomic uint32_t sum = 0;
    struct pool *pool;
    assert_int_equal(pool_open(0, NULL, &pool, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(pool_open(3, NULL, &pool, NULL), 0);
    assert_null(pool_take(pool));
    for (uint32_t i = 0; i < 1000; i++) {
        jobs[i] = (struct counting_job){.job.run = count, .sum = &sum, .value = i};
        pool_submit(pool, &jobs[i].job, i % POOL_LANES);
    }
    pool_wait(pool);
    uint32_t finished = 0;
    for (struct pool_job *job = pool_take(pool); job; job = job->next)
        finished++;
    assert_int_equal(finished, 1000);
    assert_int_equal(sum, 999 * 1000 / 2);
    assert_null(pool_take(pool));
    pool_close(pool);
}

struct blocking_job {
    struct pool_job job;
    pthread_mutex_t *gate;
    void *context;
    _Atomic bool begun;
};

static void block(struct pool_job *job, void *context) {
    struct blocking_job *blocking = (struct blocking_job *)job;
    blocking->context = context;
    blocking->begun = true;
    (void)pthread_mutex_lock(blocking->gate);
    (void)pthread_mutex_unlock(blocking->gate);
}

static void memory_does_not_wait_behind_work_and_work_that_hangs_is_seen(void **state) {
    (void)state;
    struct pool *pool;
    int mine;
    void *context[] = {&mine};
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER, open = PTHREAD_MUTEX_INITIALIZER;
    assert_int_equal(pool_open(1, context, &pool, NULL), 0);
    assert_int_equal(pool_oldest(pool), 0);
    struct blocking_job hangs = {.job.run = block, .gate = &gate}, waits = hangs;
    struct blocking_job memory = {.job.run = block, .gate = &open, .context = &mine};
    (void)pthread_mutex_lock(&gate);
    pool_submit(pool, &hangs.job, POOL_ORDINARY);
    uint64_t oldest = pool_oldest(pool);
    assert_int_not_equal(oldest, 0); /* no thread need have begun with it */
    while (!hangs.begun)
        (void)sched_yield();
    pool_submit(pool, &waits.job, POOL_URGENT);
    pool_submit(pool, &memory.job, POOL_MEMORY);
    struct pool_job *finished = NULL;
    while (!finished)
        finished = pool_take(pool);
    assert_ptr_equal(finished, &memory.job);
    assert_null(memory.context);
    assert_int_equal(pool_oldest(pool), oldest);
    (void)pthread_mutex_unlock(&gate);
    pool_wait(pool);
    assert_int_equal(pool_oldest(pool), 0);
    assert_ptr_equal(hangs.context, &mine);
    assert_ptr_equal(waits.context, &mine);
    pool_close(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_index_finds_what_is_in_it_while_it_grows),
        cmocka_unit_test(the_eviction_order_gives_the_longest_unused_first),
        cmocka_unit_test(chunks_fall_on_the_devices_granularity),
        cmocka_unit_test(metadata_takes_less_than_500_bytes_a_page),
        cmocka_unit_test(every_metric_has_a_name_a_unit_and_a_help_of_its_own),
        cmocka_unit_test(the_pool_runs_every_job_once_and_gives_it_back),
        cmocka_unit_test(memory_does_not_wait_behind_work_and_work_that_hangs_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
