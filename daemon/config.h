/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's configuration: file < environment < flags. One table (config_table.c) says which keys there are; the
 * parser, the environment's names, the flags, --help, --print-config (deploy/oscard.conf) and --check-config all follow
 * from it.
 */
#ifndef OSCAR_DAEMON_CONFIG_H
#define OSCAR_DAEMON_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "daemon/log.h"
#include "daemon/loop.h"
#include "proto/cause.h"
#include "proto/digest.h"

#define CONFIG_DEFAULT_FILE "/etc/oscard/oscard.conf"

/* Bytes, or a share of the device's memory. */
struct config_size {
    uint64_t bytes;
    uint32_t percent; /* not 0: it counts, and `bytes` does not */
};

struct config_tenant {
    uid_t uid;
    char name[OSCAR_NAME_BYTES];
};

enum config_default_tenant { CONFIG_TENANT_UID, CONFIG_TENANT_SHARED };

struct config_state; /* where each value came from */

struct config {
    /* [daemon] */
    char *runtime_dir;
    char *socket; /* absolute after config_load() */
    uint64_t socket_mode;
    char *socket_group; /* "": the process's own */
    uint64_t io_engine; /* enum loop_engine */
    uint64_t log_level, log_format;
    char *log_file; /* "": stderr */
    /* [device] */
    char *backend;
    char *device;              /* UUID; "": the first one */
    uint64_t share;            /* enum oscar_share */
    uint64_t watchdog_seconds; /* 0: none */
    /* [memory] */
    struct config_size budget, gpu_memory; /* of the latter neither: it is not set */
    struct config_size chunk;              /* 0: by the budget */
    /* [pack] */
    uint64_t pack_threads; /* 0: by the number of cores */
    /* [limits] */
    uint64_t clients, sequences, leases;
    /* [calibration] */
    char *calibration_dir;
    uint64_t max_context_tokens;
    /* [tenants] */
    uint64_t default_tenant; /* enum config_default_tenant */
    struct config_tenant *tenant;
    size_t tenants;
    /* [admin] */
    char *admin_requests, *admin_events; /* absolute paths after config_load() */
    uint64_t admin_mode;
    char *admin_group;

    struct config_state *state;
};

enum config_action { CONFIG_RUN, CONFIG_CHECK, CONFIG_PRINT, CONFIG_VERSION, CONFIG_HELP };

/*
 * Reads flags, environment ("NAME=value" strings, NULL at the end) and the file. For the actions PRINT, VERSION and
 * HELP no file is read and *ret is NULL. OSCAR_ERR_CONFIG with the place, the key, the value, the expected form and the
 * remedy; OSCAR_ERR_INVALID for a wrong command line.
 */
int config_load(int argc, char *const argv[], char *const environment[], struct config **ret,
                enum config_action *ret_action, struct oscar_cause *cause);
void config_free(struct config *config); /* NULL is fine */

/* `memory_bytes` is what a share is a share of. */
uint64_t config_size_bytes(const struct config_size *size, uint64_t memory_bytes);
/* What a chunk of packed pages, or of dense ones, aims at. */
uint64_t config_chunk_bytes(const struct config *config, uint64_t budget_bytes, bool packed);
/* The tenant of a user: from [tenants], else by its default. */
void config_tenant_of(const struct config *config, uid_t uid, char ret_name[OSCAR_NAME_BYTES]);

void config_print_help(FILE *out);
void config_print_sample(FILE *out);                                 /* every key, commented out, at its default */
void config_print_effective(const struct config *config, FILE *out); /* every key, and where its value comes from */

#endif
