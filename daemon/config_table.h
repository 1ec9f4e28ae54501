/* SPDX-License-Identifier: Apache-2.0 */
/* The table of configuration keys, and what the files that read and print it share. */
#ifndef OSCAR_DAEMON_CONFIG_TABLE_H
#define OSCAR_DAEMON_CONFIG_TABLE_H

#include "daemon/config.h"

#define CONFIG_MAX_KEYS 32

enum config_kind {
    CONFIG_TEXT,   /* char * */
    CONFIG_COUNT,  /* uint64_t, min..max */
    CONFIG_MODE,   /* uint64_t, octal file mode */
    CONFIG_CHOICE, /* uint64_t, index into choices */
    CONFIG_SIZE,   /* struct config_size; a share is allowed where max is 0 */
};

struct config_key {
    const char *section, *name;
    const char *alias; /* short flag, without "--"; NULL: none */
    enum config_kind kind;
    size_t offset; /* into struct config */
    const char *fallback;
    const char *fallback_shown; /* in words, where the default depends on the environment; NULL: as `fallback` */
    const char *const *choices;
    uint64_t min, max;
    const char *help; /* lines of at most 110 characters */
};

struct config_section {
    const char *name, *help;
};

extern const struct config_key config_keys[];
extern const size_t config_keys_count;
extern const struct config_section config_sections[];
extern const size_t config_sections_count;

struct config_state {
    char *origin[CONFIG_MAX_KEYS]; /* "FILE:LINE", "environment", "flag"; NULL: default */
};

/* Where a value stands, for errors: "FILE:LINE", "environment OSCARD_…", "flag --…". */
struct config_place {
    const char *where;
    bool once; /* the key may not have been set from here before (a file) */
};

const struct config_key *config_key_find(const char *section, const char *name);
bool config_section_known(const char *name);
/* Parses and sets one value. `section` and `name` may be unknown: that is an error then. */
int config_set(struct config *config, const char *section, const char *name, const char *value,
               const struct config_place *place, struct oscar_cause *cause);
int config_read_file(struct config *config, const char *path, struct oscar_cause *cause);
/* "--memory-budget" and "OSCARD_MEMORY_BUDGET". */
void config_flag_name(const struct config_key *key, char ret[64]);
void config_environment_name(const struct config_key *key, char ret[64]);
/* The value as it would stand in a file. */
void config_format_value(const struct config *config, const struct config_key *key, char *buffer, size_t capacity);

#endif
