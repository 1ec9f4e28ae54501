/* SPDX-License-Identifier: Apache-2.0 */
/* What happens in the demo, and what was measured while it did. */
#ifndef OSCAR_TESTS_DEMO_SCENE_H
#define OSCAR_TESTS_DEMO_SCENE_H

#include <stdbool.h>
#include <stdint.h>

#include "oscar/geometry.h"

#include "tests/demo/private_daemon.h"

/* The story in tokens. A page holds 64. */
#define PREFIX_TOKENS 640U   /* A stores them; B and C find them */
#define PREFILL_CHUNK 128U   /* of a prefill */
#define A_DECODES_TO 790U    /* A is killed at the token after: 22 tokens into page 12, half of its layers stored */
#define A_SEALED_TOKENS 768U /* of them in full pages: what others can find when A is dead */
#define B_BRANCH_SOURCE                                                                                                \
    832U                  /* B goes on with another text: the capture from here to its end, moved behind the prefix */
#define B_DECODES_TO 736U /* before the kill */
#define B_ENDS_AT 832U    /* after it */
#define C_PROMPT_TOKENS 800U /* A's text */
#define C_ENDS_AT 896U
#define ATTACHES 50U

#define PAGES(tokens) ((tokens) / OSCAR_PAGE_TOKENS)
/* Pages from the time when A is dead and B at its end. In INT2: what B's window has left of the prefix, and what A alone had. */
#define PACKED_AT_END PAGES(B_ENDS_AT - OSCAR_RECENT_TOKENS - OSCAR_SINK_TOKENS + A_SEALED_TOKENS - PREFIX_TOKENS)
/* In BF16 when C is at its end, too: the rest of the prefix, B's own, C's own. */
#define DENSE_AT_END                                                                                                   \
    PAGES(PREFIX_TOKENS - (B_ENDS_AT - OSCAR_RECENT_TOKENS) + B_ENDS_AT - PREFIX_TOKENS + C_ENDS_AT - A_SEALED_TOKENS)

enum segment_kind {
    ALL_DENSE,
    A_PREFILL,
    A_DECODE,
    B_DECODE,
    B_AFTER_KILL,
    C_JOINED,
    SEGMENTS,
};

/* Relative errors of output rows, one layer, position and query head each. */
struct segment {
    uint64_t rows;
    double sum, max;
};

struct scene {
    struct private_daemon daemon;
    const char *worker_program, *capture;
    const char *calibration;  /* its name in the daemon's folder; NULL: the default */
    int64_t dense_page_bytes; /* of the captured model */
    struct worker_process a, b, c;

    char backend[64], device[64];
    uint32_t a_hit, b_hit, c_hit;
    uint32_t b_hit_packed, c_hit_packed; /* tokens of the hit that were read as INT2 */
    double attach_us[ATTACHES];          /* sorted */
    struct segment segment[SEGMENTS];
    uint32_t b_steps_after_kill;
    double kill_settled_ms; /* from A's SIGKILL until the daemon had taken back all that was A's alone */
    bool a_was_killed;      /* by SIGKILL, and not before */
    bool b_survived, c_survived;

    /* With B and C open and all packing done. */
    int64_t pages_sink, pages_dense, pages_packed, bytes_packed, bytes_used;
    char *stats_table;    /* `oscarctl stats`, malloced */
    int64_t leaked_bytes; /* in use when all workers had gone and the cache was flushed */
};

/* A signal handler: the scene breaks off at the next line that it hears. */
void scene_interrupt(int signal);

/* Plays it all on a daemon that has started. 0 or -1, reported on standard error. */
int scene_play(struct scene *scene);
/* Ends workers that still run. */
void scene_end(struct scene *scene);
/* Frees what was measured. */
void scene_free(struct scene *scene);

#endif
