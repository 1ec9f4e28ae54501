/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests of the store without a daemon: a store on the fake device, clients whose windows and fences are plain memory, and
 * sequences that keep a page table like a worker's. Every page that a sequence may read, now or by work in flight, can be compared with
 * what its tokens say must be there (rig_seq_check). Every call ends with store_verify.
 */
#ifndef OSCAR_TESTS_STORE_RIG_H
#define OSCAR_TESTS_STORE_RIG_H

#include "daemon/store/state.h"
#include "tests/support/fake_device.h"

#define RIG_MAX_CHUNKS 4096U
#define RIG_MAX_EVENTS 65536U

struct rig_client;

struct rig {
    struct oscar_device device;
    struct store *store;
    uint64_t now_ns;
    struct oscar_identity identity;
    struct oscar_event *event; /* everything published, in order */
    uint32_t events;
    bool verify;  /* after every call */
    bool patient; /* a request that is parked for memory is left so, else it is waited for */
    uint32_t clients, clients_over, models_changed, device_failures;
};

/* What a parked call was answered. */
struct rig_answer {
    uint64_t id;
    struct oscar_reply reply;
};

struct rig_client {
    struct rig *rig;
    struct store_client *client;
    uint8_t *window;
    oscar_fence_slot *fences;
    uint64_t model;
    struct oscar_digest digest;
    uint64_t known[OSCAR_FORMS][RIG_MAX_CHUNKS]; /* generation of the chunks it was told of */
    bool writable[OSCAR_FORMS][RIG_MAX_CHUNKS];
    uint64_t request_id;
    struct rig_answer answer[64];
    uint32_t answers;
    uint64_t chunks_gone;
};

struct rig_stale {
    uint32_t page;
    oscar_page_ref ref;
    uint64_t fence; /* read until the counter has reached it */
};

struct rig_seq {
    struct rig_client *client;
    uint64_t handle;
    uint32_t fence_slot;
    uint64_t fence;   /* of its last request */
    uint32_t *tokens; /* all it knows: committed ones, and its prompt */
    uint32_t committed, reserved, sealed, in_flight;
    oscar_page_ref *page;
    uint32_t pages; /* entries */
    struct rig_stale *stale;
    uint32_t stales;
    struct oscar_digest *tag; /* what its full pages hold, as far as known */
    uint32_t tags;
};

struct rig_options {
    uint64_t budget_pages; /* in dense pages; 0: 4096 */
    uint64_t chunk_pages;  /* dense pages a chunk; 0: 8 */
    bool hash_collide;
    uint32_t max_sequences, max_leases; /* 0: 4096 */
    uint32_t threads;                   /* 0: 2 */
};

void rig_open(struct rig *rig, const struct rig_options *options);
/* Everything must be closed by then: no chunk survives. */
void rig_close(struct rig *rig);
void rig_verify(const struct rig *rig);
/* One poll, or polls until nothing moves any more. */
void rig_poll(struct rig *rig);
void rig_settle(struct rig *rig);
/* Value of a metric by name and labels ("" for none). */
uint64_t rig_metric(const struct rig *rig, const char *name, const char *labels);

struct rig_client *rig_client_new(struct rig *rig, const char *group_key);
/* Until the device has the calibration. */
int rig_model_open(struct rig_client *client, const struct oscar_identity *identity,
                   struct oscar_calibration *calibration, struct oscar_reply *ret, struct oscar_cause *cause);
void rig_client_gone(struct rig_client *client);   /* its connection ends */
void rig_client_exited(struct rig_client *client); /* and its process: the struct is freed */
void rig_client_forget(struct rig_client *client); /* the struct alone, whose exit the store knows of */
void rig_client_free(struct rig_client *client);   /* both */
int rig_request(struct rig_client *client, struct oscar_request *request, struct oscar_reply *ret);

/* 0 or an error; the sequence on success only. Tokens are copied. */
int rig_seq_open(struct rig_client *client, const uint32_t *tokens, uint32_t count, bool dense_tail,
                 struct rig_seq **ret);
int rig_seq_extend(struct rig_seq *seq, const uint32_t *tokens, uint32_t count);
int rig_seq_reserve(struct rig_seq *seq, uint32_t tokens);
/* Writes the pages that these tokens complete, and advances; the counter is raised only by rig_seq_signal. */
int rig_seq_advance(struct rig_seq *seq, const uint32_t *tokens, uint32_t count);
/* The stream has done everything so far, updates taken over. */
void rig_seq_signal(struct rig_seq *seq);
/* reserve + advance + signal + settle. */
int rig_seq_compute(struct rig_seq *seq, const uint32_t *tokens, uint32_t count);
int rig_seq_wait(struct rig_seq *seq, uint32_t timeout_ms, uint32_t *ret_available);
int rig_seq_fork(struct rig_seq *seq, struct rig_seq **ret);
/* The fork's reply, wherever it came from. */
struct rig_seq *rig_seq_forked(struct rig_seq *parent, const struct oscar_reply *reply);
/* SEQ_CLOSE; `signal`: the counter reaches its fence at once. Frees the sequence. */
void rig_seq_close(struct rig_seq *seq, bool signal);
/* The sequence's struct without a word to the store (its client is dead). */
void rig_seq_forget(struct rig_seq *seq);
/* Each page of the table and each left one that work in flight may still read holds the page of the sequence's tokens. */
void rig_seq_check(struct rig_seq *seq);
/* Form of page `page` in its table. */
enum oscar_form rig_seq_form(const struct rig_seq *seq, uint32_t page);
uint8_t *rig_address(struct rig_client *client, oscar_page_ref ref);
/* The answer to a parked call, or NULL if there is none yet; to the last request of the client if `id` is 0. */
const struct oscar_reply *rig_answered(const struct rig_client *client, uint64_t id);
uint32_t rig_probe(struct rig_client *client, const uint32_t *tokens, uint32_t count);

/* A whole prompt of `pages` pages computed by a sequence that is closed again. */
void rig_cache(struct rig_client *client, const uint32_t *tokens, uint32_t pages);

/* Deterministic token ids: `count` of the path named by `seed`, from position `from` on. */
void rig_tokens(uint32_t seed, uint32_t from, uint32_t count, uint32_t *ret);

#endif
