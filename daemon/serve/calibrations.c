/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/serve/calibrations.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/serve/calibration_files.h"
#include "proto/cleanup.h"

struct job {
    struct job *next;
    char name[OSCAR_NAME_BYTES];
    struct oscar_geometry geometry;
    struct calibrations_result result;
};

struct calibrations {
    pthread_t thread;
    struct calibration_files *files; /* the thread's */
    int event;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct job *waiting, **waiting_end; /* under the lock, as all below */
    struct job *done, **done_end;
    bool stop;
};

static void job_push(struct job ***end, struct job *job) {
    job->next = NULL;
    **end = job;
    *end = &job->next;
}

static struct job *job_pop(struct job **list, struct job ***end) {
    struct job *job = *list;
    if (job != NULL) {
        *list = job->next;
        if (*list == NULL)
            *end = list;
    }
    return job;
}

static void *work(void *arg) {
    struct calibrations *calibrations = arg;
    pthread_mutex_lock(&calibrations->lock);
    for (;;) {
        while (calibrations->waiting == NULL && !calibrations->stop)
            pthread_cond_wait(&calibrations->wake, &calibrations->lock);
        if (calibrations->stop)
            break;
        struct job *job = job_pop(&calibrations->waiting, &calibrations->waiting_end);
        pthread_mutex_unlock(&calibrations->lock);
        struct calibrations_result *result = &job->result;
        result->error = calibration_files_load(calibrations->files, job->name, &job->geometry, result, &result->cause);
        pthread_mutex_lock(&calibrations->lock);
        job_push(&calibrations->done_end, job);
        uint64_t one = 1;
        (void)!write(calibrations->event, &one, sizeof(one)); /* only fails when it is readable anyway */
    }
    pthread_mutex_unlock(&calibrations->lock);
    return NULL;
}

int calibrations_new(const char *directory, uint32_t max_pages, struct calibrations **ret, struct oscar_cause *cause) {
    _cleanup_free_ struct calibrations *calibrations = calloc(1, sizeof(*calibrations));
    if (calibrations == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for calibrations");
    calibrations->waiting_end = &calibrations->waiting;
    calibrations->done_end = &calibrations->done;
    _cleanup_close_ int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "eventfd: %m");
    int r = calibration_files_new(directory, max_pages, &calibrations->files, cause);
    if (r < 0)
        return r;
    pthread_mutex_init(&calibrations->lock, NULL);
    pthread_cond_init(&calibrations->wake, NULL);
    if (pthread_create(&calibrations->thread, NULL, work, calibrations) != 0) {
        calibration_files_free(calibrations->files);
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "cannot start the thread that reads calibrations");
    }
    calibrations->event = TAKE_FD(event);
    *ret = TAKE_PTR(calibrations);
    return 0;
}

void calibrations_free(struct calibrations *calibrations) {
    if (calibrations == NULL)
        return;
    pthread_mutex_lock(&calibrations->lock);
    calibrations->stop = true;
    pthread_cond_signal(&calibrations->wake);
    pthread_mutex_unlock(&calibrations->lock);
    pthread_join(calibrations->thread, NULL);
    for (struct job *job; (job = job_pop(&calibrations->waiting, &calibrations->waiting_end)) != NULL;)
        free(job);
    for (struct job *job; (job = job_pop(&calibrations->done, &calibrations->done_end)) != NULL;) {
        calibrations_result_free(&job->result);
        free(job);
    }
    calibration_files_free(calibrations->files);
    pthread_cond_destroy(&calibrations->wake);
    pthread_mutex_destroy(&calibrations->lock);
    close(calibrations->event);
    free(calibrations);
}

int calibrations_event_fd(const struct calibrations *calibrations) { return calibrations->event; }

int calibrations_load(struct calibrations *calibrations, const char *name, const struct oscar_geometry *geometry,
                      uint64_t ticket, struct oscar_cause *cause) {
    if (strchr(name, '/') != NULL || name[0] == '.')
        return oscar_fail(
            cause, OSCAR_ERR_CALIBRATION,
            "calibration \"%.80s\": expected the name of a file in the daemon's calibration directory, without a "
            "path, or a digest, or \"default\"",
            name);
    struct job *job = calloc(1, sizeof(*job));
    if (job == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the request");
    snprintf(job->name, sizeof(job->name), "%s", name);
    job->geometry = *geometry;
    job->result.ticket = ticket;
    job->result.file_fd = job->result.turns_fd = -1;
    pthread_mutex_lock(&calibrations->lock);
    job_push(&calibrations->waiting_end, job);
    pthread_cond_signal(&calibrations->wake);
    pthread_mutex_unlock(&calibrations->lock);
    return 0;
}

bool calibrations_take(struct calibrations *calibrations, struct calibrations_result *ret) {
    uint64_t count;
    pthread_mutex_lock(&calibrations->lock);
    struct job *job = job_pop(&calibrations->done, &calibrations->done_end);
    if (job == NULL)
        (void)!read(calibrations->event, &count, sizeof(count));
    pthread_mutex_unlock(&calibrations->lock);
    if (job == NULL)
        return false;
    *ret = job->result;
    free(job);
    return true;
}

void calibrations_result_free(struct calibrations_result *result) {
    oscar_calibration_free(result->calibration);
    result->calibration = NULL;
    if (result->file_fd >= 0)
        close(result->file_fd);
    if (result->turns_fd >= 0)
        close(result->turns_fd);
    result->file_fd = result->turns_fd = -1;
}
