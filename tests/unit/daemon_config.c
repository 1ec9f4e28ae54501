/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration: what wins over what, and what every mistake is told. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "oscar/device.h"

#include "daemon/config_table.h"
#include "tests/support/cmocka_order.h"
#include "tests/support/files.h"

#define NO_ENVIRONMENT ((const char *const[]){NULL})

static char file[] = "/tmp/oscard-config-XXXXXX";

static void write_file(const char *text) { file_write(file, text, strlen(text)); }

/* Loads with the file and these further flags (NULL at the end). */
static int load(const char *const *flags, const char *const *environment, struct config **ret,
                struct oscar_cause *cause) {
    const char *argv[32] = {"oscard", "--config", file};
    int argc = 3;
    for (; flags != NULL && *flags != NULL; flags++)
        argv[argc++] = *flags;
    enum config_action action = CONFIG_HELP;
    int r = config_load(argc, (char *const *)(void *)argv, (char *const *)(uintptr_t)environment, ret, &action, cause);
    if (r == 0)
        assert_int_equal(action, CONFIG_RUN);
    return r;
}

#define RUNTIME "[daemon]\nruntime_dir = /run/somewhere\n"

static struct config *load_text(const char *text) {
    struct config *config = NULL;
    struct oscar_cause cause = {0};
    write_file(text);
    int r = load(NULL, NO_ENVIRONMENT, &config, &cause);
    if (r < 0)
        fail_msg("%s", cause.text);
    return config;
}

/* The text is refused, and the cause holds each of the parts. */
static void refused(const char *text, const char *const *parts) {
    struct config *config = NULL;
    struct oscar_cause cause = {0};
    write_file(text);
    assert_int_equal(load(NULL, NO_ENVIRONMENT, &config, &cause), OSCAR_ERR_CONFIG);
    assert_null(config);
    for (; *parts != NULL; parts++)
        if (strstr(cause.text, *parts) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", cause.text, *parts);
}
#define REFUSED(text, ...) refused(text, (const char *const[]){__VA_ARGS__, NULL})

static void an_empty_file_gives_the_defaults(void **state) {
    (void)state;
    struct config *config = load_text("");
    assert_int_equal(config->io_engine, LOOP_AUTO);
    assert_int_equal(config->budget.percent, 25);
    assert_int_equal(config->chunk.bytes, 0);
    assert_int_equal(config->socket_mode, 0660);
    assert_int_equal(config->clients, 1024);
    assert_int_equal(config->max_context_tokens, 1048576);
    assert_string_equal(config->backend, "auto");
    assert_string_equal(config->device, "");
    assert_int_equal(config->share, OSCAR_SHARE_AUTO);
    assert_int_equal(config->watchdog_seconds, 60);
    assert_int_equal(config->gpu_memory.bytes + config->gpu_memory.percent, 0);
    config_free(config);
    config_free(NULL);
}

static void the_environment_wins_over_the_file_and_flags_over_both(void **state) {
    (void)state;
    write_file(RUNTIME "[memory]\nbudget = 1G\n[limits]\nclients = 1\nleases = 1\n");
    const char *const environment[] = {"OSCARD_LIMITS_CLIENTS=2", "OSCARD_MEMORY_BUDGET=2G", "OSCARD_PORT=tcp://1",
                                       "OTHER=1", NULL};
    static const char *const flags[] = {"--budget", "3G", NULL};
    struct config *config = NULL;
    struct oscar_cause cause = {0};
    assert_int_equal(load(flags, environment, &config, &cause), 0);
    assert_int_equal(config->leases, 1);
    assert_int_equal(config->clients, 2);
    assert_int_equal(config->budget.bytes, UINT64_C(3) << 30);
    config_free(config);
}

static void the_device_has_flags_of_its_own(void **state) {
    (void)state;
    static const char *const flags[] = {"--backend", "cuda",         "--device", "GPU-0123", "--gpu-share",
                                        "ipc",       "--gpu-memory", "60%",      NULL};
    write_file(RUNTIME "[memory]\ngpu_memory = 40G\n");
    struct config *config = NULL;
    struct oscar_cause cause = {0};
    assert_int_equal(load(flags, NO_ENVIRONMENT, &config, &cause), 0);
    assert_string_equal(config->backend, "cuda");
    assert_string_equal(config->device, "GPU-0123");
    assert_int_equal(config->share, OSCAR_SHARE_IPC);
    assert_int_equal(config->gpu_memory.percent, 60);
    config_free(config);
    /* Not set is a value, too: a flag can take a file's back. */
    static const char *const none[] = {"--gpu-memory=", NULL};
    assert_int_equal(load(none, NO_ENVIRONMENT, &config, &cause), 0);
    assert_int_equal(config->gpu_memory.bytes + config->gpu_memory.percent, 0);
    config_free(config);
    REFUSED("[memory]\ngpu_memory = 1\n", "a size of at least 1M");
    REFUSED("[device]\nshare = nvlink\n", "one of auto, vmm, ipc");
}

static void flags_have_long_and_short_names_and_take_values_both_ways(void **state) {
    (void)state;
    static const char *const ways[][3] = {{"--io-engine", "epoll", NULL},
                                          {"--io-engine=epoll", NULL, NULL},
                                          {"--daemon-io-engine", "epoll", NULL},
                                          {"--daemon-io-engine=epoll", NULL, NULL}};
    write_file(RUNTIME);
    for (size_t i = 0; i < 4; i++) {
        struct config *config = NULL;
        struct oscar_cause cause = {0};
        assert_int_equal(load(ways[i], NO_ENVIRONMENT, &config, &cause), 0);
        assert_int_equal(config->io_engine, LOOP_EPOLL);
        config_free(config);
    }
}

static void wrong_command_lines_are_refused(void **state) {
    (void)state;
    static const char *const wrong[][2] = {{"--no-such", NULL}, {"budget", NULL}, {"--budget", NULL},
                                           {"-h", NULL},        {"--", NULL},     {"", NULL}};
    write_file(RUNTIME);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct config *config = NULL;
        struct oscar_cause cause = {0};
        assert_int_equal(load(wrong[i], NO_ENVIRONMENT, &config, &cause), OSCAR_ERR_INVALID);
        assert_non_null(strstr(cause.text, "--help"));
    }
}

static void syntax_is_that_of_systemd(void **state) {
    (void)state;
    char text[20000] =
        "# comment\n; comment\n\n  [memory]  \n  budget=40G\n[daemon]\nruntime_dir = /run/x \n log_file = /";
    size_t used = strlen(text);
    memset(text + used, 'l', 3000); /* a line longer than any buffer of inih */
    strcpy(text + used + 3000, "\nsocket_group = a=b ; c\n[limits]\nclients =\t7");
    struct config *config = load_text(text);
    assert_int_equal(config->budget.bytes, UINT64_C(40) << 30);
    assert_int_equal(strlen(config->log_file), 3001);
    assert_string_equal(config->socket_group, "a=b ; c");
    assert_int_equal(config->clients, 7);
    config_free(config);
}

static void sizes_have_suffixes_and_shares(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
        uint32_t percent;
    } cases[] = {{"1048576", 1048576, 0},
                 {"64M", 64U << 20, 0},
                 {"2g", UINT64_C(2) << 30, 0},
                 {"3T", UINT64_C(3) << 40, 0},
                 {"1GiB", 1U << 30, 0},
                 {"2048K", 2048U << 10, 0},
                 {"60%", 0, 60},
                 {"100%", 0, 100}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[100];
        snprintf(text, sizeof(text), "[memory]\nbudget = %s\n", cases[i].text);
        struct config *config = load_text(text);
        assert_int_equal(config->budget.bytes, cases[i].bytes);
        assert_int_equal(config->budget.percent, cases[i].percent);
        config_free(config);
    }
    assert_int_equal(config_size_bytes(&(struct config_size){.percent = 60}, 1000), 600);
    assert_int_equal(config_size_bytes(&(struct config_size){.bytes = 7}, 1000), 7);
}

static void values_out_of_form_are_refused_with_place_key_value_and_form(void **state) {
    (void)state;
    static const char *const budgets[] = {"",     "x", "-1",           "64Q", "64MB", "0%",
                                          "101%", "1", "99999999999T", "1 G", "+5G",  "1e9"};
    for (size_t i = 0; i < sizeof(budgets) / sizeof(budgets[0]); i++) {
        char text[100], value[64];
        snprintf(text, sizeof(text), "[memory]\n\nbudget = %s\n", budgets[i]);
        snprintf(value, sizeof(value), "[memory] budget = \"%s\"", budgets[i]);
        REFUSED(text, file, ":3", value, "a share of the memory", "correct the value");
    }
    REFUSED("[memory]\nchunk = 5%\n", "chunk", "a size from 1M to 64G");
    REFUSED("[limits]\nclients = 0\n", "a number from 1 to 65536");
    REFUSED("[limits]\nclients = 65537\n", "a number from 1 to 65536");
    REFUSED("[limits]\nclients = 0x10\n", "a number from 1 to 65536");
    REFUSED("[limits]\nclients = 99999999999999999999\n", "a number from 1 to 65536");
    REFUSED("[daemon]\nsocket_mode = 0999\n", "octal mode");
    REFUSED("[daemon]\nsocket_mode = 01777\n", "octal mode");
    REFUSED("[daemon]\nio_engine = kqueue\n", "one of auto, io_uring, epoll");
    REFUSED("[device]\nbackend = tpu\n", "one of auto, host, cuda");
    REFUSED("[daemon]\nsocket =\n", "not empty");
    REFUSED("[daemon]\nsocket = a\tb\n", "without control characters");
    REFUSED("[daemon]\nruntime_dir = relative/path\n", "absolute path");
}

static void structure_mistakes_are_refused_with_their_line(void **state) {
    (void)state;
    REFUSED("[memory]\nbudgte = 1G\n", file, ":2", "no key budgte in [memory]", "--print-config");
    REFUSED("\n\n[memroy]\n", ":3", "no section [memroy]");
    REFUSED("[memory\n", ":1", "close the bracket");
    REFUSED("[memory]\nbudget\n", ":2", "expected key = value");
    REFUSED("budget = 1G\n", ":1", "before any [section]");
    REFUSED("[memory]\nbudget = 1G\n[memory]\nbudget = 2G\n", ":4", "set twice", ":2");
    struct config *config = NULL;
    struct oscar_cause cause = {0};
    file_write(file, "[memory]\0\n", 10);
    assert_int_equal(load(NULL, NO_ENVIRONMENT, &config, &cause), OSCAR_ERR_CONFIG);
    assert_non_null(strstr(cause.text, "zero byte"));
}

static void a_missing_file_and_a_directory_are_refused(void **state) {
    (void)state;
    static const char *const paths[] = {"/nonexistent/oscard.conf", "/tmp"};
    for (size_t i = 0; i < 2; i++) {
        const char *argv[] = {"oscard", "--config", paths[i], NULL};
        struct config *config = NULL;
        struct oscar_cause cause = {0};
        enum config_action action;
        int r = config_load(3, (char *const *)(void *)argv, (char *const[]){NULL}, &config, &action, &cause);
        assert_int_equal(r, OSCAR_ERR_CONFIG);
        assert_non_null(strstr(cause.text, paths[i]));
    }
}

static void an_unknown_variable_of_ours_is_refused(void **state) {
    (void)state;
    write_file(RUNTIME);
    struct config *config = NULL;
    struct oscar_cause cause = {0};
    const char *const wrong[] = {"OSCARD_MEMORY_BUDGTE=1G", NULL}, *const value[] = {"OSCARD_MEMORY_BUDGET=1Q", NULL};
    assert_int_equal(load(NULL, wrong, &config, &cause), OSCAR_ERR_CONFIG);
    assert_non_null(strstr(cause.text, "OSCARD_MEMORY_BUDGTE"));
    assert_int_equal(load(NULL, value, &config, &cause), OSCAR_ERR_CONFIG);
    assert_non_null(strstr(cause.text, "environment OSCARD_MEMORY_BUDGET"));
}

/* A printed configuration must read back as itself. */
static void blanks_around_a_value_are_no_part_of_it_anywhere(void **state) {
    (void)state;
    struct config *config = load_text(RUNTIME "socket =   a.sock  \n");
    assert_string_equal(config->socket, "/run/somewhere/a.sock");
    config_free(config);
    config = NULL;
    struct oscar_cause cause = {0};
    const char *const environment[] = {"OSCARD_DAEMON_SOCKET=a.sock ", NULL}, *const flags[] = {"--socket", "\ta",
                                                                                                NULL};
    assert_int_equal(load(NULL, environment, &config, &cause), OSCAR_ERR_CONFIG);
    assert_non_null(strstr(cause.text, "blanks around"));
    assert_int_equal(load(flags, NO_ENVIRONMENT, &config, &cause), OSCAR_ERR_CONFIG);
}

static void tenants_follow_the_user_id(void **state) {
    (void)state;
    struct config *config = load_text("[tenants]\ntenant.research = 1001, 1002\ntenant.web-2 = 0\n");
    char name[OSCAR_NAME_BYTES];
    static const struct {
        uid_t uid;
        const char *name;
    } cases[] = {{1001, "research"}, {1002, "research"}, {0, "web-2"}, {1003, "uid-1003"}};
    for (size_t i = 0; i < 4; i++) {
        config_tenant_of(config, cases[i].uid, name);
        assert_string_equal(name, cases[i].name);
    }
    config_free(config);
    config = load_text("[tenants]\ndefault = shared\n");
    config_tenant_of(config, 5, name);
    assert_string_equal(name, "shared");
    config_free(config);
}

static void tenants_that_would_be_taken_for_others_are_refused(void **state) {
    (void)state;
    REFUSED("[tenants]\ntenant.uid-7 = 1\n", ":2", "does not begin with uid-");
    REFUSED("[tenants]\ntenant.shared = 1\n", "is not shared");
    REFUSED("[tenants]\ntenant. = 1\n", "expected a name");
    REFUSED("[tenants]\ntenant.a/b = 1\n", "expected a name");
    REFUSED("[tenants]\ntenant.a = 1\ntenant.b = 2,1\n", ":3", "user 1 is in tenant a already");
    REFUSED("[tenants]\ntenant.a = 1\ntenant.a = 2\n", "set twice");
    REFUSED("[tenants]\ntenant.a = root\n", "user ids");
    REFUSED("[tenants]\ntenant.a = 1,\n", "user ids");
    REFUSED("[tenants]\ntenant.a =\n", "user ids");
    REFUSED("[tenants]\ntenant.a = 4294967295\n", "user ids");
}

static void the_runtime_directory_follows_the_environment(void **state) {
    (void)state;
    write_file("");
    struct config *config = NULL;
    struct oscar_cause cause = {0};
    const char *const systemd[] = {"RUNTIME_DIRECTORY=/run/first:/run/second", "XDG_RUNTIME_DIR=/run/user/1", NULL};
    assert_int_equal(load(NULL, systemd, &config, &cause), 0);
    assert_string_equal(config->runtime_dir, "/run/first");
    assert_string_equal(config->socket, "/run/first/worker.sock");
    assert_string_equal(config->admin_requests, "/run/first/admin.ipc");
    config_free(config);
    static const char *const elsewhere[] = {"--socket", "/elsewhere/s", NULL};
    assert_int_equal(load(elsewhere, systemd, &config, &cause), 0);
    assert_string_equal(config->socket, "/elsewhere/s");
    config_free(config);
}

static void socket_paths_have_the_kernels_limit_and_differ(void **state) {
    (void)state;
    char text[300] = "[daemon]\nruntime_dir = /";
    memset(text + strlen(text), 'd', 110);
    REFUSED(text, "at most 107", "shorter runtime_dir");
    REFUSED(RUNTIME "[admin]\nevents = worker.sock\n", "three different paths");
}

static char *printed(void (*print)(FILE *out)) {
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    print(out);
    assert_int_equal(fclose(out), 0);
    return text;
}

static void the_sample_in_deploy_is_what_the_program_prints(void **state) {
    (void)state;
    char *sample = printed(config_print_sample);
    FILE *in = fopen("deploy/oscard.conf", "re");
    assert_non_null(in);
    static char text[65536];
    size_t bytes = fread(text, 1, sizeof(text) - 1, in);
    fclose(in);
    text[bytes] = '\0';
    assert_string_equal(text, sample); /* else: oscard --print-config > deploy/oscard.conf */
    free(sample);
}

static void the_sample_loads_as_it_is_and_with_every_key_uncommented(void **state) {
    (void)state;
    char *sample = printed(config_print_sample);
    struct config *as_it_is = load_text(sample);
    unsigned keys = 0;
    for (char *line = sample; line != NULL && *line != '\0'; line = strchr(line, '\n'), line += line != NULL) {
        /* A key stands right behind its #, prose after a blank. */
        if (line[0] == '#' && line[1] != ' ' && line[1] != '\n') {
            line[0] = ' ';
            keys++;
        }
    }
    assert_int_equal(keys, config_keys_count);
    struct config *uncommented = load_text(sample);
    for (size_t i = 0; i < config_keys_count; i++) {
        char a[4200], b[4200];
        config_format_value(as_it_is, &config_keys[i], a, sizeof(a));
        config_format_value(uncommented, &config_keys[i], b, sizeof(b));
        assert_string_equal(a, b);
    }
    config_free(as_it_is);
    config_free(uncommented);
    free(sample);
}

static void help_names_every_key_with_flag_and_variable(void **state) {
    (void)state;
    char *help = printed(config_print_help);
    for (size_t i = 0; i < config_keys_count; i++) {
        char flag[64], variable[64];
        config_flag_name(&config_keys[i], flag);
        config_environment_name(&config_keys[i], variable);
        assert_non_null(strstr(help, flag));
        assert_non_null(strstr(help, variable));
    }
    free(help);
}

/* A whole GPU's memory would be thousands of chunks else, all of which a worker maps. */
static void chunks_follow_the_budget(void **state) {
    (void)state;
    static const struct {
        const char *text;
        uint64_t budget_gib, packed_mib, dense_mib;
    } cases[] = {
        {"", 2, 32, 32},
        {"", 8, 64, 64},
        {"", 64, 256, 128},
        {"", 128, 512, 256},
        {"chunk = 1G", 128, 1024, 1024},
        {"chunk = 64G", 128, 2048, 2048},
        {"chunk = 1M", 128, 128, 128},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[64];
        (void)snprintf(text, sizeof(text), "[memory]\n%s\n", cases[i].text);
        struct config *config = load_text(text);
        uint64_t budget = cases[i].budget_gib << 30;
        assert_int_equal(config_chunk_bytes(config, budget, true), cases[i].packed_mib << 20);
        assert_int_equal(config_chunk_bytes(config, budget, false), cases[i].dense_mib << 20);
        config_free(config);
    }
}

static void the_effective_configuration_loads_again(void **state) {
    (void)state;
    struct config *config = load_text(RUNTIME "[memory]\nbudget = 3G\n[tenants]\ntenant.a = 1,2\ntenant.b = 3\n");
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    config_print_effective(config, out);
    assert_int_equal(fclose(out), 0);
    assert_non_null(strstr(text, "budget = 3G"));
    assert_non_null(strstr(text, ":4\nbudget"));
    assert_non_null(strstr(text, "# default\nchunk"));
    struct config *again = load_text(text);
    assert_int_equal(again->tenants, 3);
    assert_int_equal(again->budget.bytes, config->budget.bytes);
    config_free(again);
    config_free(config);
    free(text);
}

static int make_file(void **state) {
    (void)state;
    int fd = mkstemp(file);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state) {
    (void)state;
    return unlink(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_file_gives_the_defaults),
        cmocka_unit_test(the_environment_wins_over_the_file_and_flags_over_both),
        cmocka_unit_test(the_device_has_flags_of_its_own),
        cmocka_unit_test(flags_have_long_and_short_names_and_take_values_both_ways),
        cmocka_unit_test(wrong_command_lines_are_refused),
        cmocka_unit_test(syntax_is_that_of_systemd),
        cmocka_unit_test(sizes_have_suffixes_and_shares),
        cmocka_unit_test(values_out_of_form_are_refused_with_place_key_value_and_form),
        cmocka_unit_test(structure_mistakes_are_refused_with_their_line),
        cmocka_unit_test(a_missing_file_and_a_directory_are_refused),
        cmocka_unit_test(an_unknown_variable_of_ours_is_refused),
        cmocka_unit_test(blanks_around_a_value_are_no_part_of_it_anywhere),
        cmocka_unit_test(tenants_follow_the_user_id),
        cmocka_unit_test(tenants_that_would_be_taken_for_others_are_refused),
        cmocka_unit_test(the_runtime_directory_follows_the_environment),
        cmocka_unit_test(socket_paths_have_the_kernels_limit_and_differ),
        cmocka_unit_test(the_sample_in_deploy_is_what_the_program_prints),
        cmocka_unit_test(the_sample_loads_as_it_is_and_with_every_key_uncommented),
        cmocka_unit_test(help_names_every_key_with_flag_and_variable),
        cmocka_unit_test(chunks_follow_the_budget),
        cmocka_unit_test(the_effective_configuration_loads_again),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
