/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store under a sequence of steps. A step is three bytes: a letter of `steps` (any other byte stands for one of them), whom it is
 * about, and how much. Two clients behave and check every page that they may read after every step; a third sends requests with any
 * values, in a token universe of its own, and must not get at the others' pages. Work in the pool is over after each step unless it is
 * held up, so that an input always does the same.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "tests/support/store_rig.h"

#define STEP_BYTES 3U
#define TAME 2U /* clients that behave */
#define CLIENTS (TAME + 1)
#define SLOTS 8U
#define PATH_TOKENS 3072U
#define WILD_SEED 1000U /* its tokens are of no other client's paths */
#define NS_PER_MS UINT64_C(1000000)

/* A sequence of a client that behaves; `fork_id` is not 0: a place kept for the fork of another one. */
struct place {
    struct rig_seq *seq;
    uint32_t path[PATH_TOKENS]; /* the tokens that it has and will have */
    uint64_t fork_id;
    unsigned parent;
};

/* A closed sequence whose stream is behind. */
struct late {
    struct rig_client *client;
    uint32_t fence_slot;
    uint64_t fence;
};

struct kept_lease {
    unsigned client;
    uint64_t handle;
    uint8_t secret[OSCAR_LEASE_SECRET_BYTES];
};

static struct world {
    struct rig rig;
    struct rig_client *client[CLIENTS]; /* the last one is the wild one */
    struct rig_client *zombie;          /* its connection is gone, its process not */
    struct place place[SLOTS];
    struct late late[SLOTS];
    struct kept_lease lease[SLOTS];
    uint64_t wild[SLOTS]; /* sequences of the wild client */
    uint64_t wild_fence;
    uint32_t forks; /* each goes on with tokens of its own */
    bool wild_model_closed;
    bool held;
} world;

static uint32_t tokens_of(uint8_t amount) {
    static const uint16_t tokens[16] = {0, 1, 2, 63, 64, 65, 100, 128, 192, 256, 320, 384, 448, 512, 640, 1024};
    return tokens[amount % 16];
}

static struct place *place_in_use(uint8_t who) {
    struct place *place = &world.place[who % SLOTS];
    return place->seq != NULL ? place : NULL;
}

static struct place *free_place(void) {
    for (unsigned i = 0; i < SLOTS; i++)
        if (world.place[i].seq == NULL && world.place[i].fork_id == 0)
            return &world.place[i];
    return NULL;
}

/* --- sequences of the clients that behave --- */

static void step_open(uint8_t who, uint8_t amount) {
    struct place *place = free_place();
    if (place == NULL)
        return;
    /* Paths 0 to 3 are the same for a while, two by two. */
    uint32_t seed = amount / 16 % 4, shared = 6 * OSCAR_PAGE_TOKENS;
    rig_tokens(seed % 2, 0, shared, place->path);
    rig_tokens(seed, shared, PATH_TOKENS - shared, place->path + shared);
    (void)rig_seq_open(world.client[who % TAME], place->path, tokens_of(amount), (who & 0x80) != 0, &place->seq);
}

static void step_extend(uint8_t who, uint8_t amount) {
    struct place *place = place_in_use(who);
    if (place != NULL && place->seq->committed + tokens_of(amount) <= PATH_TOKENS)
        (void)rig_seq_extend(place->seq, place->path, place->seq->committed + tokens_of(amount));
}

static void step_reserve(uint8_t who, uint8_t amount) {
    struct place *place = place_in_use(who);
    if (place != NULL)
        (void)rig_seq_reserve(place->seq, tokens_of(amount));
}

static void step_advance(uint8_t who, uint8_t amount) {
    struct place *place = place_in_use(who);
    if (place != NULL && place->seq->committed + tokens_of(amount) <= PATH_TOKENS)
        (void)rig_seq_advance(place->seq, place->path + place->seq->committed, tokens_of(amount));
}

static void step_signal(uint8_t who, uint8_t amount) {
    (void)amount;
    struct place *place = place_in_use(who);
    if (place != NULL)
        rig_seq_signal(place->seq);
}

/* Reserve, advance and signal at once. */
static void step_compute(uint8_t who, uint8_t amount) {
    step_reserve(who, amount);
    step_advance(who, amount);
    step_signal(who, amount);
}

static void adopt_fork(struct place *place, struct rig_seq *seq) {
    const struct place *parent = &world.place[place->parent];
    uint32_t committed = seq->committed;
    memcpy(place->path, parent->path, committed * sizeof(*place->path));
    rig_tokens(WILD_SEED - 1 - world.forks++ % 64, committed, PATH_TOKENS - committed, place->path + committed);
    place->seq = seq;
    place->fork_id = 0;
}

static void step_fork(uint8_t who, uint8_t amount) {
    (void)amount;
    struct place *parent = place_in_use(who), *place = free_place();
    if (parent == NULL || place == NULL)
        return;
    struct rig_seq *seq = NULL;
    place->parent = who % SLOTS;
    int r = rig_seq_fork(parent->seq, &seq);
    if (r == OSCAR_PARKED)
        place->fork_id = parent->seq->client->request_id;
    else if (r == 0)
        adopt_fork(place, seq);
}

static void step_wait(uint8_t who, uint8_t amount) {
    struct place *place = place_in_use(who);
    if (place == NULL)
        return;
    struct oscar_request request = {.verb = OSCAR_SEQ_WAIT, .seq_wait = {place->seq->handle, amount}};
    struct oscar_reply reply = {0};
    (void)rig_request(place->seq->client, &request, &reply);
}

static void step_close(uint8_t who, uint8_t amount) {
    struct place *place = place_in_use(who);
    if (place == NULL)
        return;
    struct late *late = &world.late[who % SLOTS];
    bool signal = amount % 2 == 0 || late->client != NULL;
    if (!signal)
        *late = (struct late){place->seq->client, place->seq->fence_slot, place->seq->fence + 2};
    rig_seq_close(place->seq, signal);
    place->seq = NULL;
}

static void step_catch_up(uint8_t who, uint8_t amount) {
    (void)amount;
    struct late *late = &world.late[who % SLOTS];
    if (late->client != NULL)
        atomic_store(&late->client->fences[late->fence_slot], late->fence);
    late->client = NULL;
}

/* --- leases --- */

static void step_probe(uint8_t who, uint8_t amount) {
    const struct place *place = &world.place[who % SLOTS];
    (void)rig_probe(world.client[who / SLOTS % TAME], place->path, tokens_of(amount));
}

static void step_lease(uint8_t who, uint8_t amount) {
    struct kept_lease *lease = &world.lease[amount % SLOTS];
    if (lease->handle != 0)
        return;
    struct rig_client *client = world.client[who % TAME];
    struct oscar_request request = {.verb = OSCAR_PROBE, .probe = {client->model, tokens_of(amount / SLOTS), true}};
    struct oscar_reply reply = {0};
    if (rig_request(client, &request, &reply) != 0)
        return;
    lease->client = who % TAME;
    lease->handle = reply.probe.lease;
    memcpy(lease->secret, reply.probe.secret, sizeof(lease->secret));
}

static void step_adopt(uint8_t who, uint8_t amount) {
    struct kept_lease *lease = &world.lease[amount % SLOTS];
    struct rig_client *client = world.client[who % TAME];
    struct oscar_request request = {.verb = OSCAR_LEASE_ADOPT, .lease_adopt = {.model = client->model}};
    struct oscar_reply reply = {0};
    memcpy(request.lease_adopt.secret, lease->secret, sizeof(lease->secret));
    if (rig_request(client, &request, &reply) != 0)
        return;
    lease->client = who % TAME;
    lease->handle = reply.lease_adopt.lease;
}

static void step_lease_close(uint8_t who, uint8_t amount) {
    (void)who;
    struct kept_lease *lease = &world.lease[amount % SLOTS];
    struct oscar_request request = {.verb = OSCAR_LEASE_CLOSE, .lease_close = {lease->handle}};
    struct oscar_reply reply = {0};
    (void)rig_request(world.client[lease->client], &request, &reply);
    lease->handle = 0;
}

/* --- the operator, the clock, the device --- */

static void step_flush(uint8_t who, uint8_t amount) {
    struct store_flush flush = {0};
    store_flush(world.rig.store, amount % 2 == 0 ? NULL : &world.client[who % CLIENTS]->digest, &flush);
    rig_verify(&world.rig);
}

static void step_poll(uint8_t who, uint8_t amount) {
    (void)who;
    world.rig.now_ns += amount * NS_PER_MS;
    rig_poll(&world.rig);
}

static void step_settle(uint8_t who, uint8_t amount) {
    (void)who;
    (void)amount;
    if (!world.held)
        rig_settle(&world.rig);
}

static void step_hold(uint8_t who, uint8_t amount) {
    (void)who;
    world.held = amount % 2 != 0;
    fake_device_hold(&world.rig.device, world.held);
}

static void step_fail(uint8_t who, uint8_t amount) {
    static const int errors[] = {OSCAR_ERR_NO_MEMORY, OSCAR_ERR_NO_SPACE, OSCAR_ERR_IO, OSCAR_ERR_NOT_FINITE};
    fake_device_fail(&world.rig.device, who % FAKE_CALLS, amount % 8, amount / 32, errors[amount / 8 % 4]);
}

/* Nothing is made to fail any more. */
static void forgive(void) {
    for (unsigned call = 0; call < FAKE_CALLS; call++)
        fake_device_fail(&world.rig.device, call, 0, 0, 0);
}

static void step_look(uint8_t who, uint8_t amount) {
    static struct oscar_metric metric[OSCAR_MAX_METRICS];
    FUZZ_REQUIRE(store_metrics(world.rig.store, metric, OSCAR_MAX_METRICS) <= OSCAR_MAX_METRICS);
    struct oscar_event events[4];
    uint64_t cursor = (uint64_t)who << (amount % 64);
    for (unsigned call = 0; call < 4096; call++) {
        uint32_t count = store_snapshot(world.rig.store, cursor, events, 1 + amount % 4, &cursor);
        FUZZ_REQUIRE(count <= 1U + amount % 4);
        for (uint32_t i = 0; i < count; i++)
            FUZZ_REQUIRE(events[i].kind == OSCAR_EVENT_STORED && events[i].form < OSCAR_FORMS);
        if (cursor == 0)
            return;
    }
    FUZZ_REQUIRE(cursor == 0);
}

/* --- clients --- */

static void bury(void) {
    if (world.zombie == NULL)
        return;
    for (unsigned i = 0; i < SLOTS; i++)
        if (world.late[i].client == world.zombie)
            world.late[i].client = NULL;
    rig_client_exited(world.zombie);
    world.zombie = NULL;
}

static void step_bury(uint8_t who, uint8_t amount) {
    (void)who;
    (void)amount;
    bury();
}

/* The connection ends; who behaved has read everything for the last time. */
static void part(unsigned index) {
    struct rig_client *client = world.client[index];
    bury();
    for (unsigned i = 0; i < SLOTS; i++) {
        struct place *place = &world.place[i];
        if (place->fork_id != 0 && world.place[place->parent].seq != NULL &&
            world.place[place->parent].seq->client == client)
            place->fork_id = 0;
        if (world.lease[i].client == index)
            world.lease[i].handle = 0;
    }
    for (unsigned i = 0; i < SLOTS; i++) {
        struct place *place = &world.place[i];
        if (place->seq != NULL && place->seq->client == client) {
            rig_seq_forget(place->seq);
            place->seq = NULL;
        }
    }
    rig_client_gone(client);
    world.zombie = client;
    world.client[index] = NULL;
}

static void step_replace(uint8_t who, uint8_t amount) {
    (void)amount;
    unsigned index = who % CLIENTS;
    part(index);
    forgive();
    world.client[index] = rig_client_new(&world.rig, "group");
    if (index == TAME) {
        memset(world.wild, 0, sizeof(world.wild));
        world.wild_model_closed = false;
    }
}

/* --- the client that does not behave --- */

static uint64_t wild_handle(uint8_t which) {
    switch (which % 16) {
    case 8:
        return 0;
    case 9:
        return UINT64_MAX;
    case 10:
        return world.client[TAME]->model;
    case 11:
        return world.client[TAME]->model + (UINT64_C(1) << 32);
    case 12:
    case 13: {
        const struct place *place = place_in_use(which);
        return place != NULL ? place->seq->handle : 1;
    }
    case 14:
        return world.lease[which / 16 % SLOTS].handle;
    case 15:
        return (uint64_t)which << 32 | which;
    default:
        return world.wild[which % SLOTS];
    }
}

static uint64_t wild_fence(uint8_t how) {
    switch (how / 16) {
    case 0:
        return 0;
    case 1:
        return world.wild_fence + 1;
    case 2:
        return UINT64_MAX - 1;
    case 3:
        return UINT64_MAX - 5;
    default:
        return world.wild_fence += 2;
    }
}

static uint32_t wild_tokens(uint8_t how) {
    static const uint32_t tokens[] = {UINT32_MAX, OSCAR_MAX_SEQUENCE_TOKENS + 1, UINT32_MAX - 63, 20000};
    return how >= 252 ? tokens[how % 4] : tokens_of(how);
}

static void step_wild(uint8_t who, uint8_t amount) {
    struct rig_client *client = world.client[TAME];
    struct oscar_request request = {.verb = OSCAR_PROBE + amount % (OSCAR_PING - OSCAR_PROBE)};
    struct oscar_reply reply = {0};
    uint64_t handle = wild_handle(who);
    uint32_t tokens = wild_tokens(who ^ amount);
    rig_tokens(WILD_SEED + who % 2, 0, PATH_TOKENS, (uint32_t *)(void *)(client->window + OSCAR_WINDOW_TOKENS_OFFSET));
    switch (request.verb) {
    case OSCAR_PROBE:
        request.probe.model = who % 4 != 0 ? client->model : handle;
        request.probe.tokens = tokens;
        request.probe.lease = who % 2 != 0;
        break;
    case OSCAR_LEASE_ADOPT:
        request.lease_adopt.model = client->model;
        break;
    case OSCAR_LEASE_CLOSE:
        request.lease_close.lease = handle;
        break;
    case OSCAR_SEQ_OPEN:
        request.seq_open.model = who % 4 != 0 ? client->model : handle;
        request.seq_open.tokens = tokens;
        request.seq_open.dense_tail = who % 2 != 0;
        break;
    case OSCAR_SEQ_WAIT:
        request.seq_wait.seq = handle;
        request.seq_wait.timeout_ms = tokens;
        break;
    case OSCAR_SEQ_EXTEND:
        request.seq_extend.seq = handle;
        request.seq_extend.tokens = tokens;
        request.seq_extend.fence = wild_fence(amount);
        break;
    case OSCAR_SEQ_RESERVE:
        request.seq_reserve.seq = handle;
        request.seq_reserve.tokens = tokens;
        break;
    case OSCAR_SEQ_ADVANCE:
        request.seq_advance.seq = handle;
        request.seq_advance.tokens = tokens;
        request.seq_advance.fence = wild_fence(amount);
        break;
    case OSCAR_SEQ_FORK:
        request.seq_fork.seq = handle;
        request.seq_fork.fence = wild_fence(amount);
        break;
    default:
        request.seq_close.seq = handle;
        request.seq_close.fence = wild_fence(amount);
        break;
    }
    int r = rig_request(client, &request, &reply);
    if (r == 0 && request.verb == OSCAR_SEQ_OPEN)
        world.wild[who / 16 % SLOTS] = reply.seq_open.seq;
    if (r == 0 && request.verb == OSCAR_SEQ_FORK)
        world.wild[who / 16 % SLOTS] = reply.seq_fork.seq;
}

static void step_wild_signal(uint8_t who, uint8_t amount) {
    uint64_t value = amount == 255 ? UINT64_MAX : amount % 2 != 0 ? world.wild_fence + 1 : world.wild_fence / 2;
    atomic_store(&world.client[TAME]->fences[who % 16], value);
}

/* Closes the model, with all that is open of it, and opens it again, as far as the device lets it. */
static void step_wild_model(uint8_t who, uint8_t amount) {
    (void)amount;
    struct rig_client *client = world.client[TAME];
    uint64_t handle = who % 4 != 0 ? client->model : wild_handle(who);
    if (store_model_close(world.rig.store, client->client, handle, NULL) == 0) {
        world.wild_model_closed = true;
        memset(client->known, 0, sizeof(client->known)); /* it unmaps all of it, and is told again */
    }
    rig_verify(&world.rig);
    struct oscar_reply reply = {0};
    if (world.wild_model_closed && rig_model_open(client, &world.rig.identity, NULL, &reply, NULL) == 0) {
        client->model = reply.model_open.model;
        world.wild_model_closed = false;
    }
    rig_verify(&world.rig);
}

/* --- steps --- */

static const struct {
    char letter;
    void (*run)(uint8_t who, uint8_t amount);
} steps[] = {
    {'o', step_open},    {'e', step_extend},  {'r', step_reserve}, {'a', step_advance},     {'s', step_signal},
    {'c', step_compute}, {'f', step_fork},    {'w', step_wait},    {'x', step_close},       {'u', step_catch_up},
    {'p', step_probe},   {'l', step_lease},   {'d', step_adopt},   {'m', step_lease_close}, {'F', step_flush},
    {'t', step_poll},    {'S', step_settle},  {'h', step_hold},    {'E', step_fail},        {'v', step_look},
    {'B', step_bury},    {'R', step_replace}, {'W', step_wild},    {'g', step_wild_signal}, {'M', step_wild_model},
};
#define STEPS (sizeof(steps) / sizeof(steps[0]))

static void run_step(uint8_t letter, uint8_t who, uint8_t amount) {
    size_t at = 0;
    while (at < STEPS && (uint8_t)steps[at].letter != letter)
        at++;
    steps[at < STEPS ? at : letter % STEPS].run(who, amount);
}

/* Parked calls that are over. */
static void take_answers(unsigned index) {
    struct rig_client *client = world.client[index];
    for (uint32_t i = 0; i < client->answers; i++) {
        const struct oscar_reply *reply = &client->answer[i].reply;
        if (reply->verb != OSCAR_SEQ_FORK)
            continue;
        if (index == TAME && reply->error == 0)
            world.wild[i % SLOTS] = reply->seq_fork.seq;
        for (unsigned j = 0; j < SLOTS && index != TAME; j++) {
            struct place *place = &world.place[j], *parent = &world.place[place->parent];
            if (place->fork_id != client->answer[i].id)
                continue;
            if (reply->error != 0) {
                place->fork_id = 0;
            } else if (parent->seq != NULL && parent->seq->client == client) {
                adopt_fork(place, rig_seq_forked(parent->seq, reply));
            }
        }
    }
    client->answers = 0;
}

static void begin(uint8_t options) {
    memset(&world, 0, sizeof(world));
    rig_open(&world.rig, &(struct rig_options){
                             .budget_pages = (options & 1) != 0 ? 24 : 96,
                             .chunk_pages = (options & 2) != 0 ? 1 : 4,
                             .hash_collide = (options & 4) != 0,
                             .max_sequences = 6,
                             .max_leases = 4,
                             .threads = 1,
                         });
    for (unsigned i = 0; i < CLIENTS; i++)
        world.client[i] = rig_client_new(&world.rig, "group");
}

/* With nobody left, what is cached can be flushed, and no page is held. */
static void end(void) {
    forgive();
    fake_device_hold(&world.rig.device, false);
    for (unsigned i = 0; i < CLIENTS; i++)
        part(i);
    bury();
    rig_settle(&world.rig);
    struct store_flush flush = {0};
    store_flush(world.rig.store, NULL, &flush);
    rig_settle(&world.rig);
    FUZZ_REQUIRE(flush.pages_deferred == 0);
    FUZZ_REQUIRE(rig_metric(&world.rig, "oscar_pages", "form=\"dense\"") == 0);
    FUZZ_REQUIRE(rig_metric(&world.rig, "oscar_pages", "form=\"packed\"") == 0);
    FUZZ_REQUIRE(rig_metric(&world.rig, "oscar_pages", "form=\"sink\"") == 0);
    rig_close(&world.rig);
}

int LLVMFuzzerInitialize(const int *argc, char ***argv);
int LLVMFuzzerInitialize(const int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    return setenv("CMOCKA_TEST_ABORT", "1", 1); /* an assertion of the rig is a finding */
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size == 0)
        return 0;
    begin(bytes[0]);
    for (size_t at = 1; at + STEP_BYTES <= size; at += STEP_BYTES) {
        run_step(bytes[at], bytes[at + 1], bytes[at + 2]);
        if (!world.held)
            pool_wait(world.rig.store->pool);
        for (unsigned i = 0; i < CLIENTS; i++)
            take_answers(i);
        for (unsigned i = 0; i < SLOTS; i++)
            if (world.place[i].seq != NULL)
                rig_seq_check(world.place[i].seq);
    }
    end();
    return 0;
}
