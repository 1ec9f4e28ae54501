/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a subscriber knows: the pages that can be found, rebuilt from the store's events alone. It checks each event against what came
 * before, and tells which hit an open must have.
 */
#ifndef OSCAR_TESTS_STORE_ORACLE_H
#define OSCAR_TESTS_STORE_ORACLE_H

#include "tests/support/store_rig.h"

#define ORACLE_SLOTS 65536U

struct oracle_page {
    struct oscar_digest page, parent;
    uint32_t depth, children;
    enum oscar_form form;
    bool used;
};

struct oracle {
    struct oscar_digest model;
    struct oracle_page *page; /* open addressing */
    uint64_t pages, stored, removed, cleared_pages, compressed;
};

void oracle_open(struct oracle *oracle, const struct oscar_digest *model);
void oracle_close(struct oracle *oracle);
/* Takes the events that the rig has collected. */
void oracle_follow(struct oracle *oracle, struct rig *rig);
/* How many of the path's pages can be found. */
uint32_t oracle_hit(const struct oracle *oracle, const uint32_t *tokens, uint32_t pages);
/* The store's snapshot, taken in steps of `step` pages, lists exactly these pages in these forms, parents first. */
void oracle_check_snapshot(const struct oracle *oracle, struct rig *rig, uint32_t step);

#endif
