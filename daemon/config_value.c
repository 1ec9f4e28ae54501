/* SPDX-License-Identifier: Apache-2.0 */
/* Values: parsing, checking, printing. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config_table.h"
#include "proto/cleanup.h"
#include "proto/text.h"

/* Chunks that a budget is divided into. Models and clients, of which there may be dozens, have chunks of their own. */
#define CHUNKS_AT_LEAST 64U
#define CHUNKS_AT_MOST 1024U /* they are announced to whoever opens the model all at once */
#define PACKED_CHUNKS 256U   /* each client maps all of them */
#define DENSE_CHUNKS 512U
#define LEAST_USUAL_CHUNK (UINT64_C(64) << 20)

#define TENANT_PREFIX "tenant."

static void *field(struct config *config, const struct config_key *key) { return (char *)config + key->offset; }

/* What a key takes, in words. */
static void expected_form(const struct config_key *key, char *buffer, size_t capacity) {
    switch (key->kind) {
    case CONFIG_TEXT:
        if (key->choices == NULL) {
            snprintf(buffer, capacity, "text without control characters or blanks around it%s",
                     key->min > 0 ? ", not empty" : "");
            return;
        }
        break;
    case CONFIG_COUNT:
        snprintf(buffer, capacity, "a number from %" PRIu64 " to %" PRIu64, key->min, key->max);
        return;
    case CONFIG_MODE:
        snprintf(buffer, capacity, "an octal mode from 0 to 0777, like 0660");
        return;
    case CONFIG_SIZE:
        if (key->max == 0)
            snprintf(buffer, capacity, "a size of at least 1M (64M, 40G) or a share of the memory from 1%% to 100%%");
        else
            snprintf(buffer, capacity, "a size from %" PRIu64 "M to %" PRIu64 "G", key->min >> 20, key->max >> 30);
        return;
    case CONFIG_CHOICE:
        break;
    }
    size_t used = (size_t)snprintf(buffer, capacity, "one of");
    for (size_t i = 0; key->choices[i] != NULL && used < capacity; i++)
        used += (size_t)snprintf(buffer + used, capacity - used, "%s %s", i > 0 ? "," : "", key->choices[i]);
}

static bool parse_number(const char *text, int base, const char **ret_end, uint64_t *ret) {
    if (!isdigit((unsigned char)text[0]))
        return false;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, base);
    if (errno != 0)
        return false;
    *ret = value;
    *ret_end = end;
    return true;
}

static bool parse_size(const struct config_key *key, const char *text, struct config_size *ret) {
    static const char suffixes[] = "KMGT";
    const char *rest;
    uint64_t value;
    if (text[0] == '\0' && key->fallback[0] == '\0') {
        *ret = (struct config_size){0};
        return true;
    }
    if (!parse_number(text, 10, &rest, &value))
        return false;
    if (strcmp(rest, "%") == 0) {
        if (key->max != 0 || value < 1 || value > 100)
            return false;
        *ret = (struct config_size){.percent = (uint32_t)value};
        return true;
    }
    unsigned shift = 0;
    const char *suffix = *rest != '\0' ? strchr(suffixes, toupper((unsigned char)*rest)) : NULL;
    if (suffix != NULL) {
        shift = 10 * (unsigned)(suffix - suffixes + 1);
        rest++;
        if (strcmp(rest, "iB") == 0)
            rest += 2;
    }
    if (*rest != '\0' || value > UINT64_MAX >> shift)
        return false;
    value <<= shift;
    if (value < key->min || (key->max != 0 && value > key->max) || value > (uint64_t)INT64_MAX)
        return false;
    *ret = (struct config_size){.bytes = value};
    return true;
}

/* Blanks around a value would not survive the way through a file. */
static bool has_blank_end(const char *text) {
    size_t length = strlen(text);
    return length > 0 && (isspace((unsigned char)text[0]) || isspace((unsigned char)text[length - 1]));
}

static bool parse_text(const struct config_key *key, const char *text, char **field_text) {
    if (!oscar_text_valid(text, strlen(text)) || (key->min > 0 && text[0] == '\0') || strlen(text) >= PATH_MAX ||
        has_blank_end(text))
        return false;
    bool chosen = key->choices == NULL;
    for (size_t i = 0; !chosen && key->choices[i] != NULL; i++)
        chosen = strcmp(key->choices[i], text) == 0;
    if (!chosen)
        return false;
    char *copy = strdup(text);
    if (copy == NULL)
        return false;
    free(*field_text);
    *field_text = copy;
    return true;
}

static bool parse_value(struct config *config, const struct config_key *key, const char *text) {
    const char *rest = "";
    uint64_t value = 0;
    switch (key->kind) {
    case CONFIG_TEXT:
        return parse_text(key, text, field(config, key));
    case CONFIG_SIZE:
        return parse_size(key, text, field(config, key));
    case CONFIG_COUNT:
    case CONFIG_MODE:
        if (!parse_number(text, key->kind == CONFIG_MODE ? 8 : 10, &rest, &value) || *rest != '\0' ||
            value < key->min || value > key->max)
            return false;
        break;
    case CONFIG_CHOICE:
        while (key->choices[value] != NULL && strcmp(key->choices[value], text) != 0)
            value++;
        if (key->choices[value] == NULL)
            return false;
        break;
    }
    *(uint64_t *)field(config, key) = value;
    return true;
}

static bool tenant_name_valid(const char *name) {
    size_t length = strlen(name);
    return length > 0 && length < 64 && strncmp(name, "uid-", 4) != 0 && strcmp(name, "shared") != 0 &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

static int add_tenant(struct config *config, const char *name, uid_t uid, const char *where,
                      struct oscar_cause *cause) {
    for (size_t i = 0; i < config->tenants; i++)
        if (config->tenant[i].uid == uid)
            return oscar_fail(
                cause, OSCAR_ERR_CONFIG,
                "%.100s: [tenants] user %u is in tenant %.40s already: a user has one tenant, remove it from one",
                where, uid, config->tenant[i].name);
    struct config_tenant *grown = realloc(config->tenant, (config->tenants + 1) * sizeof(*grown));
    if (grown == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the tenants");
    config->tenant = grown;
    grown[config->tenants].uid = uid;
    snprintf(grown[config->tenants].name, OSCAR_NAME_BYTES, "%s", name);
    config->tenants++;
    return 0;
}

static int set_tenant(struct config *config, const char *name, const char *value, const char *where,
                      struct oscar_cause *cause) {
    if (!tenant_name_valid(name))
        return oscar_fail(
            cause, OSCAR_ERR_CONFIG,
            "%.100s: [tenants] tenant.%.40s: expected a name of letters, digits and ._- that is not shared and does "
            "not begin with uid-",
            where, name);
    for (size_t i = 0; i < config->tenants; i++)
        if (strcmp(config->tenant[i].name, name) == 0)
            return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.100s: [tenants] tenant.%.40s is set twice: keep one line",
                              where, name);
    const char *rest = value;
    for (;;) {
        uint64_t uid;
        rest += strspn(rest, " \t");
        bool valid = parse_number(rest, 10, &rest, &uid) && uid < UINT32_MAX;
        if (valid)
            rest += strspn(rest, " \t");
        if (!valid || (*rest != ',' && *rest != '\0'))
            return oscar_fail(
                cause, OSCAR_ERR_CONFIG,
                "%.100s: [tenants] tenant.%.30s = \"%.40s\": expected user ids with commas between them, like "
                "1001,1002: correct the value",
                where, name, value);
        int r = add_tenant(config, name, (uid_t)uid, where, cause);
        if (r < 0 || *rest == '\0')
            return r;
        rest++;
    }
}

int config_set(struct config *config, const char *section, const char *name, const char *value,
               const struct config_place *place, struct oscar_cause *cause) {
    if (strcmp(section, "tenants") == 0 && strncmp(name, TENANT_PREFIX, strlen(TENANT_PREFIX)) == 0)
        return set_tenant(config, name + strlen(TENANT_PREFIX), value, place->where, cause);
    const struct config_key *key = config_key_find(section, name);
    if (key == NULL)
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.120s: no key %.40s in [%.20s]: see oscard --print-config",
                          place->where, name, section);
    char **origin = &config->state->origin[key - config_keys];
    if (place->once && *origin != NULL)
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.100s: [%s] %s is set twice, first at %.60s: keep one line",
                          place->where, section, name, *origin);
    if (!parse_value(config, key, value)) {
        char form[128];
        expected_form(key, form, sizeof(form));
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.80s: [%s] %s = \"%.40s\": expected %s: correct the value",
                          place->where, section, name, value, form);
    }
    char *copy = strdup(place->where);
    if (copy == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the configuration");
    free(*origin);
    *origin = copy;
    return 0;
}

void config_format_value(const struct config *config, const struct config_key *key, char *buffer, size_t capacity) {
    static const char suffixes[] = " KMGT";
    const void *value = (const char *)config + key->offset;
    switch (key->kind) {
    case CONFIG_TEXT:
        snprintf(buffer, capacity, "%s", *(char *const *)value);
        break;
    case CONFIG_COUNT:
        snprintf(buffer, capacity, "%" PRIu64, *(const uint64_t *)value);
        break;
    case CONFIG_MODE:
        snprintf(buffer, capacity, "%04" PRIo64, *(const uint64_t *)value);
        break;
    case CONFIG_CHOICE:
        snprintf(buffer, capacity, "%s", key->choices[*(const uint64_t *)value]);
        break;
    case CONFIG_SIZE: {
        const struct config_size *size = value;
        uint64_t bytes = size->bytes;
        size_t suffix = 0;
        while (bytes > 0 && bytes % 1024 == 0 && suffix < 4) {
            bytes /= 1024;
            suffix++;
        }
        if (size->percent > 0)
            snprintf(buffer, capacity, "%u%%", size->percent);
        else if (size->bytes == 0)
            snprintf(buffer, capacity, "%s", key->fallback); /* not set */
        else if (suffix == 0)
            snprintf(buffer, capacity, "%" PRIu64, bytes);
        else
            snprintf(buffer, capacity, "%" PRIu64 "%c", bytes, suffixes[suffix]);
        break;
    }
    }
}

uint64_t config_size_bytes(const struct config_size *size, uint64_t memory_bytes) {
    return size->percent == 0 ? size->bytes : memory_bytes / 100 * size->percent;
}

uint64_t config_chunk_bytes(const struct config *config, uint64_t budget_bytes, bool packed) {
    uint64_t usual = budget_bytes / (packed ? PACKED_CHUNKS : DENSE_CHUNKS), bytes = config->chunk.bytes;
    if (bytes == 0)
        bytes = usual > LEAST_USUAL_CHUNK ? usual : LEAST_USUAL_CHUNK;
    if (bytes < budget_bytes / CHUNKS_AT_MOST)
        bytes = budget_bytes / CHUNKS_AT_MOST;
    return bytes < budget_bytes / CHUNKS_AT_LEAST ? bytes : budget_bytes / CHUNKS_AT_LEAST;
}

void config_tenant_of(const struct config *config, uid_t uid, char ret_name[OSCAR_NAME_BYTES]) {
    for (size_t i = 0; i < config->tenants; i++) {
        if (config->tenant[i].uid == uid) {
            snprintf(ret_name, OSCAR_NAME_BYTES, "%s", config->tenant[i].name);
            return;
        }
    }
    if (config->default_tenant == CONFIG_TENANT_SHARED)
        snprintf(ret_name, OSCAR_NAME_BYTES, "shared");
    else
        snprintf(ret_name, OSCAR_NAME_BYTES, "uid-%u", uid);
}
