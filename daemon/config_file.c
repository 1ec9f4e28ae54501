/* SPDX-License-Identifier: Apache-2.0 */
/* The file: [section], key = value, # and ; begin a comment line. Lines may be of any length. */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config_table.h"
#include "proto/cleanup.h"

static void close_file(FILE **file) {
    if (*file != NULL)
        (void)fclose(*file);
}

/* Cuts white space off both ends, in place. */
static char *trim(char *text) {
    while (isspace((unsigned char)*text))
        text++;
    size_t length = strlen(text);
    while (length > 0 && isspace((unsigned char)text[length - 1]))
        text[--length] = '\0';
    return text;
}

static int read_section(char *text, const char *where, char ret_section[32], struct oscar_cause *cause) {
    size_t length = strlen(text);
    if (text[length - 1] != ']')
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.120s: \"%.40s\": expected [section]: close the bracket", where,
                          text);
    text[length - 1] = '\0';
    const char *name = trim(text + 1);
    if (!config_section_known(name))
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.120s: no section [%.40s]: see oscard --print-config", where,
                          name);
    snprintf(ret_section, 32, "%s", name);
    return 0;
}

static int read_line(struct config *config, char *line, const char *where, char section[32],
                     struct oscar_cause *cause) {
    char *text = trim(line);
    if (text[0] == '\0' || text[0] == '#' || text[0] == ';')
        return 0;
    if (text[0] == '[')
        return read_section(text, where, section, cause);
    char *equals = strchr(text, '=');
    if (equals == NULL)
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.120s: \"%.40s\": expected key = value, [section] or a # comment",
                          where, text);
    if (section[0] == '\0')
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.120s: \"%.40s\" stands before any [section]: put it into one",
                          where, text);
    *equals = '\0';
    return config_set(config, section, trim(text), trim(equals + 1), &(struct config_place){where, true}, cause);
}

int config_read_file(struct config *config, const char *path, struct oscar_cause *cause) {
    _cleanup_(close_file) FILE *file = fopen(path, "re");
    if (file == NULL)
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.120s: cannot be read: %m: name another file with --config", path);
    _cleanup_free_ char *line = NULL;
    size_t capacity = 0;
    char section[32] = "";
    ssize_t length;
    for (unsigned number = 1; errno = 0, (length = getline(&line, &capacity, file)) >= 0; number++) {
        char where[4200];
        snprintf(where, sizeof(where), "%.4090s:%u", path, number);
        if (strlen(line) != (size_t)length)
            return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.120s: a zero byte: this is not a text file", where);
        int r = read_line(config, line, where, section, cause);
        if (r < 0)
            return r;
    }
    if (ferror(file))
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "%.120s: cannot be read: %m: name a text file with --config", path);
    return 0;
}
