/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/store_oracle.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

void oracle_open(struct oracle *oracle, const struct oscar_digest *model) {
    *oracle = (struct oracle){.model = *model, .page = calloc(ORACLE_SLOTS, sizeof *oracle->page)};
}

void oracle_close(struct oracle *oracle) { free(oracle->page); }

static bool same(const struct oscar_digest *a, const struct oscar_digest *b) { return memcmp(a, b, sizeof *a) == 0; }

static uint32_t home(const struct oscar_digest *digest) {
    uint32_t key;
    memcpy(&key, digest, sizeof key);
    return key % ORACLE_SLOTS;
}

static struct oracle_page *find(const struct oracle *oracle, const struct oscar_digest *digest) {
    uint32_t at = home(digest);
    for (; oracle->page[at].used; at = (at + 1) % ORACLE_SLOTS)
        if (same(&oracle->page[at].page, digest))
            return &oracle->page[at];
    return NULL;
}

static void add(struct oracle *oracle, const struct oracle_page *page) {
    uint32_t at = home(&page->page);
    while (oracle->page[at].used)
        at = (at + 1) % ORACLE_SLOTS;
    oracle->page[at] = *page;
    assert_true(++oracle->pages < ORACLE_SLOTS / 2);
}

static void take(struct oracle *oracle, struct oracle_page *page) {
    page->used = false;
    oracle->pages--;
    /* What follows may have been pushed on by it. */
    for (uint32_t at = (uint32_t)(page - oracle->page + 1) % ORACLE_SLOTS; oracle->page[at].used;
         at = (at + 1) % ORACLE_SLOTS) {
        struct oracle_page moved = oracle->page[at];
        oracle->page[at].used = false;
        oracle->pages--;
        add(oracle, &moved);
    }
}

static void follow_one(struct oracle *oracle, const struct oscar_event *event) {
    if (event->kind == OSCAR_EVENT_CLEARED) {
        if (event->has_model && !same(&event->model, &oracle->model))
            return;
        oracle->cleared_pages += oracle->pages;
        oracle->pages = 0;
        memset(oracle->page, 0, ORACLE_SLOTS * sizeof *oracle->page);
        return;
    }
    assert_true(event->has_model);
    if (!same(&event->model, &oracle->model))
        return;
    struct oracle_page *page = find(oracle, &event->page), *parent = find(oracle, &event->parent);
    assert_true(event->depth == 0 ? same(&event->parent, &oracle->model) : parent && parent->depth + 1 == event->depth);
    switch (event->kind) {
    case OSCAR_EVENT_STORED:
        assert_null(page);
        assert_int_equal(event->form, OSCAR_FORM_DENSE);
        if (parent)
            parent->children++;
        add(oracle, &(struct oracle_page){.page = event->page,
                                          .parent = event->parent,
                                          .depth = event->depth,
                                          .form = event->form,
                                          .used = true});
        oracle->stored++;
        break;
    case OSCAR_EVENT_COMPRESSED:
        assert_non_null(page);
        assert_int_equal(page->form, OSCAR_FORM_DENSE);
        assert_int_equal(event->form, event->depth == 0 ? OSCAR_FORM_SINK : OSCAR_FORM_PACKED);
        page->form = event->form;
        oracle->compressed++;
        break;
    default:
        assert_int_equal(event->kind, OSCAR_EVENT_REMOVED);
        assert_non_null(page);
        assert_int_equal(page->form, event->form);
        assert_int_equal(page->children, 0); /* no hole */
        if (parent)
            parent->children--;
        take(oracle, find(oracle, &event->page));
        oracle->removed++;
    }
}

void oracle_follow(struct oracle *oracle, struct rig *rig) {
    for (uint32_t i = 0; i < rig->events; i++)
        follow_one(oracle, &rig->event[i]);
    rig->events = 0;
}

uint32_t oracle_hit(const struct oracle *oracle, const uint32_t *tokens, uint32_t pages) {
    struct oscar_digest digest = oracle->model;
    for (uint32_t page = 0; page < pages; page++) {
        struct oscar_digest parent = digest;
        oscar_chain_digest(&parent, tokens + (size_t)page * OSCAR_PAGE_TOKENS, &digest);
        if (!find(oracle, &digest))
            return page;
    }
    return pages;
}

void oracle_check_snapshot(const struct oracle *oracle, struct rig *rig, uint32_t step) {
    struct oracle seen;
    oracle_open(&seen, &oracle->model);
    struct oscar_event *events = calloc(step, sizeof *events);
    uint64_t cursor = 0;
    do {
        uint32_t count = store_snapshot(rig->store, cursor, events, step, &cursor);
        assert_true(count == step || cursor == 0);
        for (uint32_t i = 0; i < count; i++) {
            const struct oscar_event *event = &events[i];
            assert_int_equal(event->kind, OSCAR_EVENT_STORED);
            if (!same(&event->model, &oracle->model))
                continue;
            const struct oracle_page *page = find(oracle, &event->page);
            assert_non_null(page);
            assert_true(same(&page->parent, &event->parent));
            assert_int_equal(page->form, event->form);
            assert_int_equal(page->depth, event->depth);
            assert_null(find(&seen, &event->page));
            assert_true(event->depth == 0 || find(&seen, &event->parent));
            add(&seen, page);
        }
    } while (cursor != 0);
    assert_int_equal(seen.pages, oracle->pages);
    free(events);
    oracle_close(&seen);
}
