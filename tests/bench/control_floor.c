/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/control_floor.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#define XXH_NO_PREFETCH /* it reaches beyond a page, where gcc 13 sees an array overrun */
#include <xxhash.h>

#include "oscar/geometry.h"

#include "tests/bench/samples.h"

#define PAGE_TOKENS OSCAR_PAGE_TOKENS

struct floor_page {
    uint64_t hash;
    uint32_t references;
    uint32_t tokens[PAGE_TOKENS];
};

struct control_floor {
    uint32_t paths, pages;
    uint32_t *shared; /* token ids of one path, shared with the child */
    int socket;
    pid_t child;
};

struct floor_request {
    uint32_t pages; /* 0: an empty round trip */
};

struct floor_answer {
    uint32_t hits;
};

void control_tokens(uint32_t path, uint32_t first_page, uint32_t pages, uint32_t *ret_tokens) {
    for (uint32_t page = 0; page < pages; page++) {
        uint64_t state = ((uint64_t)path << 32 | (first_page + page)) * UINT64_C(0x9e3779b97f4a7c15) + 1;
        for (uint32_t i = 0; i < PAGE_TOKENS; i++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ret_tokens[page * PAGE_TOKENS + i] = (uint32_t)(state % 150000);
        }
    }
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void *map_shared(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die("bench: mmap");
    return memory;
}

static inline uint64_t page_hash(uint64_t parent, const uint32_t *tokens) {
    return XXH3_64bits_withSeed(tokens, PAGE_TOKENS * sizeof(*tokens), parent);
}

/* The other process: builds the table, then answers until the socket closes. */
static void serve(const struct control_floor *floor, int socket) {
    size_t count = (size_t)floor->paths * floor->pages, slots = 1;
    while (slots < 2 * count)
        slots *= 2;
    struct floor_page *page = malloc(count * sizeof(*page));
    uint32_t *slot = calloc(slots, sizeof(*slot));
    if (page == NULL || slot == NULL)
        die("bench: memory of the floor's table");
    for (uint32_t path = 0; path < floor->paths; path++) {
        uint64_t hash = 0;
        for (uint32_t i = 0; i < floor->pages; i++) {
            size_t index = (size_t)path * floor->pages + i;
            control_tokens(path, i, 1, page[index].tokens);
            hash = page[index].hash = page_hash(hash, page[index].tokens);
            page[index].references = 0;
            size_t at = hash & (slots - 1);
            while (slot[at] != 0)
                at = (at + 1) & (slots - 1);
            slot[at] = (uint32_t)index + 1;
        }
    }
    struct floor_request request;
    struct floor_answer answer = {0};
    if (send(socket, &answer, sizeof(answer), 0) < 0)
        die("bench: floor ready");
    while (recv(socket, &request, sizeof(request), 0) == (ssize_t)sizeof(request)) {
        uint64_t hash = 0;
        answer.hits = 0;
        for (uint32_t i = 0; i < request.pages; i++) {
            const uint32_t *tokens = floor->shared + (size_t)i * PAGE_TOKENS;
            hash = page_hash(hash, tokens);
            size_t at = hash & (slots - 1);
            while (slot[at] != 0 && page[slot[at] - 1].hash != hash)
                at = (at + 1) & (slots - 1);
            if (slot[at] == 0 || memcmp(page[slot[at] - 1].tokens, tokens, PAGE_TOKENS * sizeof(*tokens)) != 0)
                break;
            page[slot[at] - 1].references++;
            answer.hits++;
        }
        if (send(socket, &answer, sizeof(answer), 0) < 0)
            break;
    }
    _exit(0);
}

struct control_floor *control_floor_start(uint32_t paths, uint32_t pages) {
    struct control_floor *floor = malloc(sizeof(*floor));
    int pair[2];
    if (floor == NULL || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        die("bench: floor");
    *floor = (struct control_floor){.paths = paths, .pages = pages, .socket = pair[0]};
    floor->shared = map_shared((size_t)pages * PAGE_TOKENS * sizeof(uint32_t));
    floor->child = fork();
    if (floor->child < 0)
        die("bench: fork");
    if (floor->child == 0) {
        close(pair[0]);
        serve(floor, pair[1]);
    }
    close(pair[1]);
    struct floor_answer ready;
    if (recv(floor->socket, &ready, sizeof(ready), 0) != (ssize_t)sizeof(ready))
        die("bench: floor did not start");
    return floor;
}

static uint64_t ask_ns(struct control_floor *floor, uint32_t pages) {
    struct floor_request request = {.pages = pages};
    struct floor_answer answer;
    uint64_t begin = bench_now_ns();
    if (send(floor->socket, &request, sizeof(request), 0) < 0 ||
        recv(floor->socket, &answer, sizeof(answer), 0) != (ssize_t)sizeof(answer))
        die("bench: floor");
    uint64_t end = bench_now_ns();
    if (answer.hits != pages) {
        fprintf(stderr, "bench: the floor found %u of %u pages\n", answer.hits, pages);
        exit(1);
    }
    return end - begin;
}

uint64_t control_floor_lookup_ns(struct control_floor *floor, uint32_t path) {
    control_tokens(path, 0, floor->pages, floor->shared);
    return ask_ns(floor, floor->pages);
}

uint64_t control_floor_roundtrip_ns(struct control_floor *floor) { return ask_ns(floor, 0); }

void control_floor_stop(struct control_floor *floor) {
    close(floor->socket);
    waitpid(floor->child, NULL, 0);
    munmap(floor->shared, (size_t)floor->pages * PAGE_TOKENS * sizeof(uint32_t));
    free(floor);
}
