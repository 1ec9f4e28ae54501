/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/config.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/config_table.h"
#include "proto/cleanup.h"

static const struct {
    const char *flag;
    enum config_action action;
} action_flags[] = {
    {"--check-config", CONFIG_CHECK},
    {"--print-config", CONFIG_PRINT},
    {"--version", CONFIG_VERSION},
    {"--help", CONFIG_HELP},
};

const struct config_key *config_key_find(const char *section, const char *name) {
    for (size_t i = 0; i < config_keys_count; i++)
        if (strcmp(config_keys[i].section, section) == 0 && strcmp(config_keys[i].name, name) == 0)
            return &config_keys[i];
    return NULL;
}

bool config_section_known(const char *name) {
    for (size_t i = 0; i < config_sections_count; i++)
        if (strcmp(config_sections[i].name, name) == 0)
            return true;
    return false;
}

void config_flag_name(const struct config_key *key, char ret[64]) {
    snprintf(ret, 64, "--%s-%s", key->section, key->name);
    for (char *c = ret; *c != '\0'; c++)
        if (*c == '_')
            *c = '-';
}

void config_environment_name(const struct config_key *key, char ret[64]) {
    snprintf(ret, 64, "OSCARD_%s_%s", key->section, key->name);
    for (char *c = ret; *c != '\0'; c++)
        *c = (char)toupper((unsigned char)*c);
}

void config_free(struct config *config) {
    if (config == NULL)
        return;
    for (size_t i = 0; i < config_keys_count; i++) {
        if (config_keys[i].kind == CONFIG_TEXT)
            free(*(char **)(void *)((char *)config + config_keys[i].offset));
        if (config->state != NULL)
            free(config->state->origin[i]);
    }
    free(config->state);
    free(config->tenant);
    free(config);
}

static void config_cleanup(struct config **config) { config_free(*config); }

static int config_new(struct config **ret, struct oscar_cause *cause) {
    _cleanup_(config_cleanup) struct config *config = calloc(1, sizeof(*config));
    if (config != NULL)
        config->state = calloc(1, sizeof(*config->state));
    if (config == NULL || config->state == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the configuration");
    for (size_t i = 0; i < config_keys_count; i++) {
        const struct config_key *key = &config_keys[i];
        int r =
            config_set(config, key->section, key->name, key->fallback, &(struct config_place){"default", false}, cause);
        if (r < 0)
            return r;
        free(config->state->origin[i]);
        config->state->origin[i] = NULL;
    }
    *ret = TAKE_PTR(config);
    return 0;
}

/* Other programs' variables may begin with OSCARD_ too (Kubernetes makes OSCARD_PORT for a service): only a name that
 * goes on with one of our sections is taken for a key. */
static int read_environment(struct config *config, char *const environment[], struct oscar_cause *cause) {
    for (char *const *variable = environment; *variable != NULL; variable++) {
        const char *equals = strchr(*variable, '=');
        if (strncmp(*variable, "OSCARD_", 7) != 0 || equals == NULL)
            continue;
        char name[64], where[96];
        snprintf(name, sizeof(name), "%.*s", (int)(equals - *variable), *variable);
        snprintf(where, sizeof(where), "environment %s", name);
        const struct config_key *found = NULL;
        bool ours = false;
        for (size_t i = 0; i < config_keys_count && found == NULL; i++) {
            char candidate[64];
            config_environment_name(&config_keys[i], candidate);
            ours |= strncmp(candidate, name, 8 + strlen(config_keys[i].section)) == 0;
            if (strcmp(candidate, name) == 0)
                found = &config_keys[i];
        }
        if (found == NULL && ours)
            return oscar_fail(cause, OSCAR_ERR_CONFIG, "%s: no such key: see oscard --help for the names", where);
        if (found == NULL)
            continue;
        int r =
            config_set(config, found->section, found->name, equals + 1, &(struct config_place){where, false}, cause);
        if (r < 0)
            return r;
    }
    return 0;
}

static const struct config_key *key_of_flag(const char *flag, size_t length) {
    for (size_t i = 0; i < config_keys_count; i++) {
        char name[64];
        config_flag_name(&config_keys[i], name);
        if (strlen(name) == length && strncmp(name, flag, length) == 0)
            return &config_keys[i];
        const char *alias = config_keys[i].alias;
        if (alias != NULL && strlen(alias) + 2 == length && strncmp(alias, flag + 2, length - 2) == 0)
            return &config_keys[i];
    }
    return NULL;
}

static bool is_action(const char *flag, enum config_action *ret) {
    for (size_t i = 0; i < sizeof(action_flags) / sizeof(action_flags[0]); i++) {
        if (strcmp(flag, action_flags[i].flag) == 0) {
            *ret = action_flags[i].action;
            return true;
        }
    }
    return false;
}

/* Goes through the flags. Without `config` it only finds the file and the action. */
static int read_flags(struct config *config, int argc, char *const argv[], const char **ret_file,
                      enum config_action *ret_action, struct oscar_cause *cause) {
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i];
        if (is_action(flag, ret_action))
            continue;
        size_t length = strcspn(flag, "=");
        bool file = length == strlen("--config") && strncmp(flag, "--config", length) == 0;
        const struct config_key *key = file || strncmp(flag, "--", 2) != 0 ? NULL : key_of_flag(flag, length);
        if (!file && key == NULL)
            return oscar_fail(cause, OSCAR_ERR_INVALID, "unknown argument \"%.80s\": see oscard --help", flag);
        const char *value = flag[length] == '=' ? flag + length + 1 : argv[++i];
        if (value == NULL)
            return oscar_fail(cause, OSCAR_ERR_INVALID, "flag %.80s needs a value: see oscard --help", flag);
        if (file) {
            *ret_file = value;
        } else if (config != NULL) {
            char where[96];
            snprintf(where, sizeof(where), "flag %.*s", (int)length, flag);
            int r = config_set(config, key->section, key->name, value, &(struct config_place){where, false}, cause);
            if (r < 0)
                return r;
        }
    }
    return 0;
}

static const char *environment_get(char *const environment[], const char *name) {
    size_t length = strlen(name);
    for (char *const *variable = environment; *variable != NULL; variable++)
        if (strncmp(*variable, name, length) == 0 && (*variable)[length] == '=' && (*variable)[length + 1] != '\0')
            return *variable + length + 1;
    return NULL;
}

static int set_runtime_dir(struct config *config, char *const environment[], struct oscar_cause *cause) {
    const char *given = config->runtime_dir;
    if (given[0] == '/') /* NOLINT(clang-analyzer-core.NullDereference): every text has its default, by the table */
        return 0;
    if (given[0] != '\0')
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "[daemon] runtime_dir = \"%.100s\": expected an absolute path",
                          given);
    const char *systemd = environment_get(environment, "RUNTIME_DIRECTORY"),
               *user = environment_get(environment, "XDG_RUNTIME_DIR");
    char *path = NULL;
    int length;
    if (systemd != NULL)
        length = asprintf(&path, "%.*s", (int)strcspn(systemd, ":"), systemd);
    else if (geteuid() == 0)
        length = asprintf(&path, "/run/oscard");
    else if (user != NULL)
        length = asprintf(&path, "%s/oscard", user);
    else
        return oscar_fail(cause, OSCAR_ERR_CONFIG,
                          "no runtime directory: set [daemon] runtime_dir, or XDG_RUNTIME_DIR");
    if (length < 0)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the configuration");
    free(config->runtime_dir);
    config->runtime_dir = path;
    return 0;
}

static int make_socket_path(const struct config *config, char **path, const char *key, struct oscar_cause *cause) {
    if (**path != '/') { /* NOLINT(clang-analyzer-core.NullDereference): as above */
        char *absolute;
        if (asprintf(&absolute, "%s/%s", config->runtime_dir, *path) < 0)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the configuration");
        free(*path);
        *path = absolute;
    }
    const size_t limit = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1;
    if (strlen(*path) > limit)
        return oscar_fail(cause, OSCAR_ERR_CONFIG,
                          "%s: %.100s... has %zu characters, a socket's path at most %zu: use a shorter runtime_dir",
                          key, *path, strlen(*path), limit);
    return 0;
}

static int complete(struct config *config, char *const environment[], struct oscar_cause *cause) {
    int r = set_runtime_dir(config, environment, cause);
    if (r == 0)
        r = make_socket_path(config, &config->socket, "[daemon] socket", cause);
    if (r == 0)
        r = make_socket_path(config, &config->admin_requests, "[admin] requests", cause);
    if (r == 0)
        r = make_socket_path(config, &config->admin_events, "[admin] events", cause);
    if (r == 0 &&
        (strcmp(config->socket, config->admin_requests) == 0 || strcmp(config->socket, config->admin_events) == 0 ||
         strcmp(config->admin_requests, config->admin_events) == 0))
        r = oscar_fail(cause, OSCAR_ERR_CONFIG,
                       "[daemon] socket, [admin] requests and [admin] events: expected three different paths");
    return r;
}

int config_load(int argc, char *const argv[], char *const environment[], struct config **ret,
                enum config_action *ret_action, struct oscar_cause *cause) {
    enum config_action action = CONFIG_RUN;
    const char *file = environment_get(environment, "OSCARD_CONFIG");
    int r = read_flags(NULL, argc, argv, &file, &action, cause);
    if (r < 0)
        return r;
    if (action == CONFIG_PRINT || action == CONFIG_VERSION || action == CONFIG_HELP) {
        *ret = NULL;
        *ret_action = action;
        return 0;
    }
    _cleanup_(config_cleanup) struct config *config = NULL;
    r = config_new(&config, cause);
    if (r < 0)
        return r;
    if (file == NULL && access(CONFIG_DEFAULT_FILE, F_OK) == 0)
        file = CONFIG_DEFAULT_FILE;
    if (file != NULL)
        r = config_read_file(config, file, cause);
    if (r == 0)
        r = read_environment(config, environment, cause);
    if (r == 0)
        r = read_flags(config, argc, argv, &file, &action, cause);
    if (r == 0)
        r = complete(config, environment, cause);
    if (r < 0)
        return r;
    *ret = TAKE_PTR(config);
    *ret_action = action;
    return 0;
}
