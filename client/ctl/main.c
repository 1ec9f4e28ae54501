/* SPDX-License-Identifier: Apache-2.0 */
/* oscarctl: an operator's view of oscard. The tables below are the command line: they give the parser and the help. */
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/ctl.h"

#define DEFAULT_TIMEOUT_MS 5000U
#define SYSTEM_DIRECTORY "/run/oscard"

static const struct verb {
    const char *name;
    int (*run)(const struct ctl *ctl, struct oscar_cause *cause);
    const char *help;
} verbs[] = {
    {"stats", ctl_stats, "what the cache holds and what it has done"},
    {"flush", ctl_flush, "empty the cache; pages that somebody reads are freed after the last reader"},
    {"events", ctl_events, "follow the cache's changes as JSON lines; gaps are healed by a snapshot"},
    {"version", ctl_version, "of this program and of the daemon"},
};

/* The same letters as in `options`. */
static const struct parameter {
    const char *name;
    int letter;
    const char *argument, *verb, *help; /* NULL: none; every verb */
} parameters[] = {
    {"runtime-dir", 'd', "DIR", NULL,
     "where the daemon's sockets are; default: $OSCAR_RUNTIME_DIR, $XDG_RUNTIME_DIR/oscard, /run/oscard"},
    {"socket-dir", 'd', "DIR", NULL, "the same"},
    {"socket", 's', "PATH", NULL, "the administration socket itself; default: admin.ipc in that directory"},
    {"timeout", 't', "MS", NULL, "give up after so many milliseconds; default: 5000"},
    {"json", 'j', NULL, NULL, "for programs"},
    {"model", 'm', "HEX", "flush", "only this model, by its digest"},
    {"snapshot", 'S', NULL, "events", "only what is there now"},
    {"count", 'n', "N", "events", "end after so many events"},
    {"help", 'h', NULL, NULL, "this text"},
    {"version", 'V', NULL, NULL, "of this program"},
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static void print_help(FILE *stream) {
    fprintf(stream, "usage: oscarctl [options] VERB\n\nverbs:\n");
    for (size_t i = 0; i < COUNT(verbs); i++)
        fprintf(stream, "  %-22s %s\n", verbs[i].name, verbs[i].help);
    fprintf(stream, "\noptions:\n");
    for (size_t i = 0; i < COUNT(parameters); i++) {
        const struct parameter *parameter = &parameters[i];
        char left[32];
        (void)snprintf(left, sizeof(left), "--%s%s%s", parameter->name, parameter->argument ? " " : "",
                       parameter->argument ? parameter->argument : "");
        fprintf(stream, "  %-22s %s%s%s\n", left, parameter->verb ? parameter->verb : "", parameter->verb ? ": " : "",
                parameter->help);
    }
    fprintf(stream, "\nexit status: %d success, %d failure, %d wrong usage, %d no daemon there, %d no answer in time\n",
            EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NO_DAEMON, EXIT_NO_ANSWER);
}

__attribute__((format(printf, 1, 2))) static int wrong_usage(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "oscarctl: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, " (oscarctl --help)\n");
    va_end(arguments);
    return EXIT_USAGE;
}

/* --- reading the command line ------------------------------------------------------------------------------------- */

struct command {
    struct ctl ctl;
    const char *directory, *socket;
    const struct verb *verb;
    const struct parameter *special; /* a parameter that only one verb has */
};

static bool read_number(const char *text, uint64_t most, uint64_t *ret) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || value == 0 || value > most)
        return false;
    *ret = value;
    return true;
}

static bool read_digest(const char *text, struct oscar_digest *ret) {
    if (strlen(text) != (size_t)2 * OSCAR_DIGEST_BYTES || strspn(text, "0123456789abcdefABCDEF") != strlen(text))
        return false;
    for (size_t i = 0; i < OSCAR_DIGEST_BYTES; i++) {
        char pair[3] = {text[2 * i], text[2 * i + 1], '\0'};
        ret->bytes[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    return true;
}

static int take_parameter(struct command *command, const struct parameter *parameter, const char *argument) {
    uint64_t number;
    if (parameter->verb != NULL)
        command->special = parameter;
    switch (parameter->letter) {
    case 'd':
        command->directory = argument;
        break;
    case 's':
        command->socket = argument;
        break;
    case 't':
        if (!read_number(argument, INT_MAX, &number))
            return wrong_usage("--timeout %s: not a number of milliseconds", argument);
        command->ctl.timeout_ms = (uint32_t)number;
        break;
    case 'n':
        if (!read_number(argument, UINT64_MAX, &command->ctl.count))
            return wrong_usage("--count %s: not a number", argument);
        break;
    case 'm':
        if (!read_digest(argument, &command->ctl.model))
            return wrong_usage("--model %s: not the 64 hex digits of a model digest", argument);
        command->ctl.has_model = true;
        break;
    case 'j':
        command->ctl.json = true;
        break;
    case 'S':
        command->ctl.snapshot = true;
        break;
    default:
        break;
    }
    return EXIT_OK;
}

static int take_verb(struct command *command, const char *name) {
    if (command->verb != NULL)
        return wrong_usage("one verb, not %s and %s", command->verb->name, name);
    for (size_t i = 0; i < COUNT(verbs); i++)
        if (strcmp(verbs[i].name, name) == 0)
            command->verb = &verbs[i];
    return command->verb != NULL ? EXIT_OK : wrong_usage("no verb %s", name);
}

/* -1 where there is something to do, else the exit status. */
static int read_arguments(int argc, char **argv, struct command *command) {
    struct option options[COUNT(parameters) + 1] = {0};
    for (size_t i = 0; i < COUNT(parameters); i++)
        options[i] = (struct option){.name = parameters[i].name,
                                     .has_arg = parameters[i].argument != NULL ? required_argument : no_argument,
                                     .val = parameters[i].letter};
    for (int letter, index = 0; (letter = getopt_long(argc, argv, "h", options, &index)) != -1;) {
        if (letter == '?')
            return wrong_usage("cannot go on");
        if (letter == 'h') {
            print_help(stdout);
            return EXIT_OK;
        }
        if (letter == 'V') {
            printf("oscarctl %s\n", OSCAR_VERSION_STRING);
            return EXIT_OK;
        }
        int status = take_parameter(command, &parameters[index], optarg);
        if (status != EXIT_OK)
            return status;
    }
    for (; optind < argc; optind++) {
        int status = take_verb(command, argv[optind]);
        if (status != EXIT_OK)
            return status;
    }
    if (command->verb == NULL) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (command->special != NULL && strcmp(command->special->verb, command->verb->name) != 0)
        return wrong_usage("%s has no --%s", command->verb->name, command->special->name);
    return -1;
}

/* --- finding the daemon ------------------------------------------------------------------------------------------- */

static bool put_path(char ret[108], const char *directory, const char *name) {
    return snprintf(ret, 108, "%s%s%s", directory, name[0] != '\0' ? "/" : "", name) < 108;
}

/* The user's own daemon comes before the system's, where there is one. */
static void default_directory(char ret[108]) {
    const char *given = getenv("OSCAR_RUNTIME_DIR"), *own = getenv("XDG_RUNTIME_DIR");
    char path[108];
    if (given != NULL && given[0] != '\0' && put_path(ret, given, ""))
        return;
    if (own != NULL && own[0] != '\0' && put_path(ret, own, "oscard") && put_path(path, ret, "admin.ipc") &&
        (access(path, F_OK) == 0 || access(SYSTEM_DIRECTORY, F_OK) != 0))
        return;
    (void)put_path(ret, SYSTEM_DIRECTORY, "");
}

static bool find_sockets(struct command *command) {
    struct ctl *ctl = &command->ctl;
    char directory[108];
    if (command->socket != NULL) { /* the other socket lies beside it */
        const char *slash = strrchr(command->socket, '/');
        (void)snprintf(directory, sizeof(directory), "%.*s", slash != NULL ? (int)(slash - command->socket) : 1,
                       slash != NULL ? command->socket : ".");
        return put_path(ctl->requests, command->socket, "") && put_path(ctl->events, directory, "events.ipc");
    }
    if (command->directory == NULL)
        default_directory(directory);
    else if (!put_path(directory, command->directory, ""))
        return false;
    return put_path(ctl->requests, directory, "admin.ipc") && put_path(ctl->events, directory, "events.ipc");
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

static int report(const struct command *command, int error, const struct oscar_cause *cause) {
    fprintf(stderr, "oscarctl %s: %s: %s\n", command->verb->name, oscar_error_text(error), cause->text);
    fprintf(stderr, "remedy: %s\n",
            error == OSCAR_ERR_NOT_RUNNING ? "start oscard, or name its directory (--runtime-dir, OSCAR_RUNTIME_DIR)"
                                           : oscar_error_remedy(error));
    return error == OSCAR_ERR_NOT_RUNNING ? EXIT_NO_DAEMON : error == OSCAR_ERR_TIMEOUT ? EXIT_NO_ANSWER : EXIT_FAILED;
}

int main(int argc, char **argv) {
    struct command command = {.ctl = {.timeout_ms = DEFAULT_TIMEOUT_MS}};
    int status = read_arguments(argc, argv, &command);
    if (status >= 0)
        return status;
    if (!find_sockets(&command))
        return wrong_usage("the path of the socket is longer than the 107 bytes that a socket may have");
    struct oscar_cause cause = {0};
    int r = command.verb->run(&command.ctl, &cause);
    if (r == 0 && fflush(stdout) != 0)
        r = oscar_fail(&cause, OSCAR_ERR_IO, "writing the output: %m");
    return r < 0 ? report(&command, r, &cause) : EXIT_OK;
}
