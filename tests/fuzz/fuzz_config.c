/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's configuration: the first byte says whether the rest is a file ('f'), the environment ('e') or flags ('a'), the latter two
 * of strings with zero bytes between them. A file that is accepted is printed, read again and printed the same; a value from elsewhere may
 * have blanks around it, which a file cannot say.
 */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/config.h"
#include "proto/cleanup.h"
#include "proto/text.h"
#include "tests/fuzz/fuzz.h"

#define MAX_STRINGS 16
#define FILE_FLAG "--config"

static int file_fd = -1;
static char file_path[32];

static void config_cleanup(struct config **config) { config_free(*config); }

static void write_file(const void *bytes, size_t size) {
    if (file_fd < 0) {
        file_fd = memfd_create("oscard.conf", MFD_CLOEXEC);
        FUZZ_REQUIRE(file_fd >= 0);
        (void)snprintf(file_path, sizeof(file_path), "/proc/self/fd/%d", file_fd);
    }
    FUZZ_REQUIRE(ftruncate(file_fd, 0) == 0 && pwrite(file_fd, bytes, size, 0) == (ssize_t)size);
}

/* Splits the input into strings. Those that name a file to read are left out: only ours is. */
static size_t split(char *text, size_t size, char *strings[MAX_STRINGS]) {
    size_t count = 0;
    for (size_t at = 0; at < size && count < MAX_STRINGS; at += strlen(text + at) + 1)
        if (strncmp(text + at, FILE_FLAG, strlen(FILE_FLAG)) != 0 && strncmp(text + at, "OSCARD_CONFIG", 13) != 0)
            strings[count++] = text + at;
    return count;
}

static int load(char *const flags[], size_t flags_count, char *const variables[], size_t variables_count,
                struct config **ret) {
    static char name[] = "oscard", file_flag[] = FILE_FLAG, directory[] = "RUNTIME_DIRECTORY=/run/oscard";
    char *argv[MAX_STRINGS + 4] = {name, file_flag, file_path}, *environment[MAX_STRINGS + 2] = {NULL};
    memcpy(argv + 3, flags, flags_count * sizeof(*flags));
    memcpy(environment, variables, variables_count * sizeof(*variables));
    environment[variables_count] = directory; /* the same wherever this runs */
    enum config_action action = CONFIG_RUN;
    struct oscar_cause cause = {0};
    int r = config_load((int)flags_count + 3, argv, environment, ret, &action, &cause);
    if (r < 0) {
        FUZZ_REQUIRE(r == OSCAR_ERR_CONFIG || (r == OSCAR_ERR_INVALID && flags_count > 0));
        FUZZ_REQUIRE(cause.text[0] != '\0' && oscar_text_valid(cause.text, strlen(cause.text)) && *ret == NULL);
    }
    return r;
}

/* The configuration as a file, without the comments that say where each value comes from. */
static char *print(const struct config *config) {
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    FUZZ_REQUIRE(out != NULL);
    config_print_effective(config, out);
    FUZZ_REQUIRE(fclose(out) == 0 && strlen(text) == size);
    char *to = text;
    for (const char *line = text; *line != '\0';) {
        size_t length = strcspn(line, "\n") + 1;
        if (*line != '#') {
            memmove(to, line, length);
            to += length;
        }
        line += length;
    }
    *to = '\0';
    return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size == 0)
        return 0;
    _cleanup_free_ char *text = calloc(1, size), *first = NULL, *second = NULL;
    FUZZ_REQUIRE(text != NULL);
    memcpy(text, bytes + 1, size - 1);
    _cleanup_(config_cleanup) struct config *config = NULL, *again = NULL;
    char *strings[MAX_STRINGS];
    bool is_file = bytes[0] % 3 == 'f' % 3, flags = bytes[0] % 3 == 'a' % 3;
    write_file(text, is_file ? size - 1 : 0);
    size_t count = is_file ? 0 : split(text, size - 1, strings);
    int r = load(strings, flags ? count : 0, strings, flags ? 0 : count, &config);
    if (r < 0 || config == NULL)
        return 0;
    char tenant[OSCAR_NAME_BYTES];
    config_tenant_of(config, 1000, tenant);
    FUZZ_REQUIRE(tenant[0] != '\0');
    FUZZ_REQUIRE(config_size_bytes(&config->budget, UINT64_C(1) << 36) > 0);
    first = print(config);
    if (!is_file)
        return 0;
    write_file(first, strlen(first));
    r = load(strings, 0, strings, 0, &again);
    FUZZ_REQUIRE(r == 0);
    second = print(again);
    FUZZ_REQUIRE(strcmp(first, second) == 0);
    return 0;
}
