/* SPDX-License-Identifier: Apache-2.0 */
/* How announced chunks get into a model's ranges: how many calls of the backend that takes, and what one bad chunk does
 * to the others. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/src/mapping.h"
#include "tests/unit/client_fixture.h"

#define MODEL 5U
#define PAGE_BYTES ((uint64_t)64 << 10) /* one page a chunk */
#define CHUNKS 500U
#define RECORD_CHUNKS 100U

static struct oscar_device_ops ops; /* the host's, but for range_map */
static unsigned calls, most;        /* of range_map, and chunks in one of them */

static int counted_map(struct oscar_range *range, const struct oscar_range_chunk *chunk, uint32_t chunks,
                       struct oscar_cause *cause) {
    calls++;
    most = chunks > most ? chunks : most;
    return oscar_device_host()->range_map(range, chunk, chunks, cause);
}

/* One chunk of the daemon's, whose first byte says which; announced under every index. */
struct owned {
    struct oscar_chunk *chunk;
    int fd;
};

struct scene {
    struct oscar_mappings mappings;
    struct oscar_attachment *attachment;
    struct oscar_geometry geometry;
    struct oscar_reply reply;
    struct oscar_mapping *mapping;
    struct owned owned[2];
};

static struct owned make_owned(const struct scene *scene, uint8_t mark) {
    struct owned owned;
    assert_int_equal(ops.chunk_create(scene->attachment->device, PAGE_BYTES, &owned.chunk, NULL), 0);
    assert_int_equal(ops.chunk_export(owned.chunk, false, &owned.fd, NULL), 0);
    ops.chunk_address(owned.chunk)[0] = mark;
    return owned;
}

static int open_scene(void **state) {
    struct scene *scene = calloc(1, sizeof(*scene));
    assert_non_null(scene);
    oscar_mappings_init(&scene->mappings);
    assert_int_equal(oscar_attachment_new("host", NULL, &scene->attachment), 0);
    ops = *scene->attachment->ops;
    ops.range_map = counted_map;
    scene->attachment->ops = &ops;
    oscar_geometry_init(&scene->geometry, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, OSCAR_BF16);
    scene->reply.model_open.model = MODEL;
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        scene->reply.model_open.arenas[form] =
            (struct oscar_arena_info){.page_bytes = PAGE_BYTES, .chunk_pages = 1, .max_pages = CHUNKS};
    for (uint8_t i = 0; i < 2; i++)
        scene->owned[i] = make_owned(scene, i + 1);
    calls = most = 0;
    *state = scene;
    return 0;
}

static void open_mapping(struct scene *scene) {
    struct oscar_cause cause = {""};
    if (oscar_mapping_open(&scene->mappings, scene->attachment, &scene->geometry, &scene->reply, &scene->mapping,
                           &cause) < 0)
        fail_msg("%s", cause.text);
}

static int close_scene(void **state) {
    struct scene *scene = *state;
    oscar_mapping_close(&scene->mappings, scene->mapping);
    for (unsigned i = 0; i < 2; i++) {
        close(scene->owned[i].fd);
        ops.chunk_free(scene->owned[i].chunk);
    }
    oscar_mappings_destroy(&scene->mappings);
    oscar_attachment_unref(scene->attachment);
    free(scene);
    return 0;
}

/* A notice that is being written. */
static struct oscar_notice notice;
static struct oscar_record record;

static void add(enum oscar_form form, uint32_t index, uint64_t generation, int fd) {
    notice.kind = OSCAR_NOTICE_CHUNKS;
    notice.chunk[notice.chunks++] = (struct oscar_chunk_info){
        .model = MODEL, .form = form, .index = index, .generation = generation, .bytes = PAGE_BYTES};
    record.fd[record.fds++] = fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

static void announce(struct scene *scene) {
    struct oscar_cause cause = {""};
    if (oscar_mappings_notice(&scene->mappings, &notice, &record, &cause) < 0)
        fail_msg("%s", cause.text);
    notice.chunks = 0;
}

/* The mark of the chunk that is mapped there; 0: none is. */
static unsigned mark_at(const struct scene *scene, enum oscar_form form, uint32_t index) {
    const struct oscar_arena *arena = &scene->mapping->arenas[form];
    return arena->chunk[index].mapped ? *oscar_mapping_page(scene->mapping, oscar_page_ref_make(form, index)) : 0;
}

static void a_record_is_one_call_a_form_and_leaves_no_descriptor(void **state) {
    struct scene *scene = *state;
    unsigned before = open_descriptors();
    open_mapping(scene);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        add(OSCAR_FORM_PACKED, i, 1, scene->owned[0].fd);
        if (i + 3 >= CHUNKS)
            add(OSCAR_FORM_SINK, i + 3 - CHUNKS, 1, scene->owned[1].fd);
        if (i % RECORD_CHUNKS + 1 < RECORD_CHUNKS)
            continue;
        announce(scene);
        assert_int_equal(open_descriptors(), before);
    }
    assert_int_equal(calls, CHUNKS / RECORD_CHUNKS + 1);
    assert_int_equal(most, RECORD_CHUNKS); /* of one form */
    for (uint32_t i = 0; i < CHUNKS; i++)
        assert_int_equal(mark_at(scene, OSCAR_FORM_PACKED, i), 1);
    for (uint32_t i = 0; i < CHUNKS; i++)
        assert_int_equal(mark_at(scene, OSCAR_FORM_SINK, i), i < 3 ? 2 : 0);
}

static void chunks_of_a_model_that_is_not_open_leave_no_descriptor(void **state) {
    struct scene *scene = *state;
    unsigned before = open_descriptors();
    for (uint32_t i = 0; i < 3; i++)
        add(OSCAR_FORM_PACKED, i, 1, scene->owned[0].fd);
    announce(scene);
    assert_int_equal(open_descriptors(), before);
    open_mapping(scene);
    assert_int_equal(calls, 0);
    assert_int_equal(mark_at(scene, OSCAR_FORM_PACKED, 0), 0);
}

static void a_later_notice_is_one_call_in_any_order(void **state) {
    struct scene *scene = *state;
    open_mapping(scene);
    for (uint32_t i = 0; i < 100; i++)
        add(OSCAR_FORM_PACKED, i * 37 % 100 * 3, 1, scene->owned[0].fd);
    announce(scene);
    assert_int_equal(calls, 1);
    for (uint32_t i = 0; i < CHUNKS; i++)
        assert_int_equal(mark_at(scene, OSCAR_FORM_PACKED, i), i < 300 && i % 3 == 0);
}

static void of_one_place_the_newest_chunk_is_mapped(void **state) {
    struct scene *scene = *state;
    open_mapping(scene);
    add(OSCAR_FORM_PACKED, 4, 1, scene->owned[0].fd);
    add(OSCAR_FORM_PACKED, 4, 3, scene->owned[1].fd);
    add(OSCAR_FORM_PACKED, 4, 2, scene->owned[0].fd);
    announce(scene);
    assert_int_equal(calls, 1);
    assert_int_equal(most, 1);
    assert_int_equal(mark_at(scene, OSCAR_FORM_PACKED, 4), 2);
    add(OSCAR_FORM_PACKED, 4, 4, scene->owned[0].fd);
    announce(scene);
    assert_int_equal(mark_at(scene, OSCAR_FORM_PACKED, 4), 1);
}

static void a_chunk_that_is_mapped_is_left_alone(void **state) {
    struct scene *scene = *state;
    open_mapping(scene);
    add(OSCAR_FORM_PACKED, 0, 1, scene->owned[0].fd);
    announce(scene);
    add(OSCAR_FORM_PACKED, 0, 1, scene->owned[0].fd);
    announce(scene);
    assert_int_equal(calls, 1);
    assert_int_equal(mark_at(scene, OSCAR_FORM_PACKED, 0), 1);
}

static void a_bad_chunk_fails_alone(void **state) {
    struct scene *scene = *state;
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    open_mapping(scene);
    for (uint32_t i = 0; i < 10; i++)
        add(OSCAR_FORM_PACKED, i, 1, i == 6 ? null : scene->owned[0].fd);
    announce(scene);
    for (uint32_t i = 0; i < 10; i++) {
        assert_int_equal(mark_at(scene, OSCAR_FORM_PACKED, i), i != 6);
        assert_int_equal(scene->mapping->arenas[OSCAR_FORM_PACKED].chunk[i].failure, i == 6 ? OSCAR_ERR_INVALID : 0);
    }
    close(null);
}

#define SCENE_TEST(test) cmocka_unit_test_setup_teardown(test, open_scene, close_scene)

int main(void) {
    const struct CMUnitTest tests[] = {
        SCENE_TEST(a_record_is_one_call_a_form_and_leaves_no_descriptor),
        SCENE_TEST(chunks_of_a_model_that_is_not_open_leave_no_descriptor),
        SCENE_TEST(a_later_notice_is_one_call_in_any_order),
        SCENE_TEST(of_one_place_the_newest_chunk_is_mapped),
        SCENE_TEST(a_chunk_that_is_mapped_is_left_alone),
        SCENE_TEST(a_bad_chunk_fails_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
