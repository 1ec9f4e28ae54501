/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's log: one line an event, to stderr (with journald's priority prefix under systemd) or to a file, as text
 * or JSON.
 *
 *     log_info("client connected", log_number("session", id), log_text("tenant", tenant));
 *
 * Writing never blocks and never fails the caller: a line that the file or pipe does not take at once is dropped and
 * counted, and the next line that gets through says how many were lost. For the loop's thread and the daemon's own
 * threads alike.
 */
#ifndef OSCAR_DAEMON_LOG_H
#define OSCAR_DAEMON_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARNING, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };
enum log_format { LOG_FORMAT_TEXT, LOG_FORMAT_JSON };

/* `path` NULL or empty: stderr. OSCAR_ERR_IO when the file cannot be opened; the log stays as it was then. */
int log_open(enum log_level level, enum log_format format, const char *path, struct oscar_cause *cause);
/* Opens the file of log_open() anew, for log rotation. */
int log_reopen(struct oscar_cause *cause);
void log_close(void);
uint64_t log_lines_dropped(void);

struct log_field {
    const char *key;  /* NULL ends the list */
    const char *text; /* NULL: `number` */
    int64_t number;
};

static inline struct log_field log_text(const char *key, const char *text) {
    return (struct log_field){.key = key, .text = text != NULL ? text : ""};
}
static inline struct log_field log_number(const char *key, int64_t number) {
    return (struct log_field){.key = key, .number = number};
}
/* The two fields of a failure: its name and its exact cause. */
#define log_failure(code, reason) log_text("error", oscar_error_name(code)), log_text("cause", (reason)->text)

void log_write(enum log_level level, const char *event, const struct log_field *fields);

#define log_event(level, event, ...)                                                                                   \
    log_write(level, event, (const struct log_field[]){__VA_ARGS__ __VA_OPT__(, ){.key = NULL}})
#define log_error(...) log_event(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_event(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_info(...) log_event(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_event(LOG_LEVEL_DEBUG, __VA_ARGS__)

/* Keeps one kind of event that a client can cause at will from flooding the log: so many lines in ten seconds. */
struct log_limit {
    uint32_t lines_max;
    uint64_t span_start_ns;
    uint32_t lines;
    uint64_t suppressed;
};
/* The last field of such a line: how many like it were held back before; nothing if none. */
static inline struct log_field log_suppressed(uint64_t lines) {
    return (struct log_field){.key = lines > 0 ? "suppressed" : NULL, .number = (int64_t)lines};
}
/* True when a line may be written now; then *ret_suppressed lines of its kind were held back before it. */
bool log_limit_pass(struct log_limit *limit, uint64_t now_ns, uint64_t *ret_suppressed);

#endif
