/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/log.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/cleanup.h"
#include "proto/text.h"

#define LOG_LINE_BYTES 4096U /* PIPE_BUF: a line goes into a pipe whole or not at all */
#define LOG_LIMIT_SPAN_NS UINT64_C(10000000000)

static const struct {
    const char *name;
    int journal_priority;
} levels[] = {
    [LOG_LEVEL_ERROR] = {"error", 3},
    [LOG_LEVEL_WARNING] = {"warning", 4},
    [LOG_LEVEL_INFO] = {"info", 6},
    [LOG_LEVEL_DEBUG] = {"debug", 7},
};

static struct {
    pthread_mutex_t lock;
    enum log_level level;
    enum log_format format;
    char *path; /* NULL: stderr */
    int fd;
    bool journal;
    bool may_block; /* a pipe, socket or terminal: asked before each write whether it takes a line */
    _Atomic uint64_t dropped;
    uint64_t dropped_told;
} log_state = {.lock = PTHREAD_MUTEX_INITIALIZER, .level = LOG_LEVEL_INFO, .fd = STDERR_FILENO, .may_block = true};

/* systemd sets JOURNAL_STREAM to the device and inode of the stream: stderr may have been redirected since. */
static bool stderr_is_journal(void) {
    const char *stream = getenv("JOURNAL_STREAM");
    struct stat status;
    char ours[64];
    if (stream == NULL || fstat(STDERR_FILENO, &status) < 0)
        return false;
    snprintf(ours, sizeof(ours), "%ju:%ju", (uintmax_t)status.st_dev, (uintmax_t)status.st_ino);
    return strcmp(stream, ours) == 0;
}

static int open_file(const char *path, int *ret_fd, struct oscar_cause *cause) {
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0640);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot open log file %s: %m", path);
    *ret_fd = fd;
    return 0;
}

static void use_fd(int fd) {
    struct stat status;
    log_state.fd = fd;
    log_state.may_block = fstat(fd, &status) < 0 || !S_ISREG(status.st_mode);
}

int log_open(enum log_level level, enum log_format format, const char *path, struct oscar_cause *cause) {
    _cleanup_close_ int fd = -1;
    _cleanup_free_ char *copy = NULL;
    if (path != NULL && path[0] != '\0') {
        int r = open_file(path, &fd, cause);
        if (r < 0)
            return r;
        copy = strdup(path);
        if (copy == NULL)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the log file's name");
    }
    log_close();
    pthread_mutex_lock(&log_state.lock);
    log_state.level = level;
    log_state.format = format;
    log_state.journal = copy == NULL && stderr_is_journal();
    log_state.path = TAKE_PTR(copy);
    use_fd(log_state.path != NULL ? TAKE_FD(fd) : STDERR_FILENO);
    pthread_mutex_unlock(&log_state.lock);
    return 0;
}

int log_reopen(struct oscar_cause *cause) {
    if (log_state.path == NULL)
        return 0;
    int fd = -1;
    int r = open_file(log_state.path, &fd, cause);
    if (r < 0)
        return r;
    pthread_mutex_lock(&log_state.lock);
    close(log_state.fd);
    use_fd(fd);
    pthread_mutex_unlock(&log_state.lock);
    return 0;
}

void log_close(void) {
    pthread_mutex_lock(&log_state.lock);
    if (log_state.path != NULL)
        close(log_state.fd);
    free(log_state.path);
    log_state.path = NULL;
    use_fd(STDERR_FILENO);
    pthread_mutex_unlock(&log_state.lock);
}

uint64_t log_lines_dropped(void) { return atomic_load_explicit(&log_state.dropped, memory_order_relaxed); }

static size_t append(char *line, size_t used, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Returns LOG_LINE_BYTES - 2 at most: there is always room for a newline and a terminator. */
static size_t append(char *line, size_t used, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line + used, LOG_LINE_BYTES - 1 - used, format, arguments);
    va_end(arguments);
    if (length < 0)
        return used;
    used += (size_t)length;
    return used < LOG_LINE_BYTES - 2 ? used : LOG_LINE_BYTES - 2;
}

static void time_now(char ret_text[40]) {
    struct timespec now;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    size_t used = strftime(ret_text, 32, "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(ret_text + used, 40 - used, ".%03ldZ", now.tv_nsec / 1000000);
}

/* A value stands bare when nothing in it could be taken for the next field. */
static size_t append_value(char *line, size_t used, const char *text) {
    if (text[0] != '\0' && strpbrk(text, " \"=\\") == NULL)
        return append(line, used, "%s", text);
    used = append(line, used, "\"");
    for (const char *c = text; *c != '\0'; c++)
        used = append(line, used, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    return append(line, used, "\"");
}

static size_t format_text(char *line, enum log_level level, const char *event, const struct log_field *fields) {
    size_t used;
    if (log_state.journal) {
        used = append(line, 0, "<%d>%s", levels[level].journal_priority, event);
    } else {
        char now[40];
        time_now(now);
        used = append(line, 0, "%s %s %s", now, levels[level].name, event);
    }
    for (const struct log_field *field = fields; field->key != NULL; field++) {
        used = append(line, used, " %s=", field->key);
        used = field->text == NULL ? append(line, used, "%lld", (long long)field->number)
                                   : append_value(line, used, field->text);
    }
    oscar_text_clean(line, used);
    return used;
}

static size_t format_json(char *line, enum log_level level, const char *event, const struct log_field *fields) {
    char now[40];
    time_now(now);
    json_t *object = json_pack("{s:s, s:s, s:s}", "time", now, "level", levels[level].name, "event", event);
    for (const struct log_field *field = fields; field->key != NULL; field++) {
        if (field->text == NULL) {
            json_object_set_new(object, field->key, json_integer(field->number));
            continue;
        }
        char value[1024];
        snprintf(value, sizeof(value), "%s", field->text);
        oscar_text_clean(value, strlen(value));
        json_object_set_new(object, field->key, json_string(value));
    }
    size_t used = json_dumpb(object, line, LOG_LINE_BYTES - 2, JSON_COMPACT);
    json_decref(object);
    return used <= LOG_LINE_BYTES - 2 ? used : 0;
}

/* Called with the lock held. */
static bool put(char *line, size_t used) {
    if (log_state.may_block) {
        struct pollfd target = {.fd = log_state.fd, .events = POLLOUT};
        if (poll(&target, 1, 0) != 1 || (target.revents & POLLOUT) == 0)
            return false;
    }
    line[used++] = '\n';
    return write(log_state.fd, line, used) == (ssize_t)used;
}

static bool format_and_put(enum log_level level, const char *event, const struct log_field *fields) {
    char line[LOG_LINE_BYTES];
    size_t used = log_state.format == LOG_FORMAT_JSON ? format_json(line, level, event, fields)
                                                      : format_text(line, level, event, fields);
    return used > 0 && put(line, used);
}

void log_write(enum log_level level, const char *event, const struct log_field *fields) {
    if (level > log_state.level)
        return;
    int saved = errno;
    pthread_mutex_lock(&log_state.lock);
    uint64_t dropped = log_lines_dropped();
    if (dropped > log_state.dropped_told) {
        int64_t count = (int64_t)(dropped - log_state.dropped_told);
        const struct log_field told[] = {log_number("lines", count), {.key = NULL}};
        if (format_and_put(LOG_LEVEL_WARNING, "log lines were dropped", told))
            log_state.dropped_told = dropped;
    }
    if (!format_and_put(level, event, fields))
        atomic_fetch_add_explicit(&log_state.dropped, 1, memory_order_relaxed);
    pthread_mutex_unlock(&log_state.lock);
    errno = saved;
}

bool log_limit_pass(struct log_limit *limit, uint64_t now_ns, uint64_t *ret_suppressed) {
    if (limit->lines == 0 || now_ns - limit->span_start_ns >= LOG_LIMIT_SPAN_NS) {
        limit->span_start_ns = now_ns;
        limit->lines = 0;
    }
    if (limit->lines >= limit->lines_max) {
        limit->suppressed++;
        return false;
    }
    limit->lines++;
    *ret_suppressed = limit->suppressed;
    limit->suppressed = 0;
    return true;
}
