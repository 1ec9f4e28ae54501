/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The main job end to end: several worker processes share one prefix through oscard, the one that computed it is killed, and the
 * others do not notice. Their model is a replay of real activations, so every output can be compared with the exact one. All of it
 * is played twice: with a calibration that was fitted to the model, and with the default that knows nothing of it.
 *
 * usage: oscar_demo [--json] [--backend auto|host|cuda] [--capture FILE] [--calibration FILE] [--daemon PATH] [--oscarctl PATH]
 *                   [--worker PATH]
 *
 * Exit status 0 only when everything was as it must be. With --json the last line is one JSON object: docs/DEMO.md names its keys.
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/demo/report.h"
#include "tests/demo/scene.h"

/* The pages of the demo take a few MB. On a GPU chunks are whole granules of 2 MiB: in large ones hardly anything is padding. */
#define MEMORY "budget = 256M\ngpu_memory = 4G\nchunk = 64M\n"
#define EXIT_WRONG 1
#define EXIT_USAGE 2

struct options {
    bool json;
    const char *daemon, *oscarctl, *worker, *capture, *calibration;
    const char *backend; /* auto, host or cuda: the daemon says what else is wrong with it */
};

static int parse(int argc, char **argv, struct options *options) {
    static const struct option names[] = {
        {"json", no_argument, NULL, 'j'},
        {"daemon", required_argument, NULL, 'd'},
        {"oscarctl", required_argument, NULL, 'o'},
        {"worker", required_argument, NULL, 'w'},
        {"capture", required_argument, NULL, 'c'},
        {"calibration", required_argument, NULL, 'f'},
        {"backend", required_argument, NULL, 'b'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    for (int option; (option = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (option) {
        case 'j':
            options->json = true;
            break;
        case 'd':
            options->daemon = optarg;
            break;
        case 'o':
            options->oscarctl = optarg;
            break;
        case 'w':
            options->worker = optarg;
            break;
        case 'c':
            options->capture = optarg;
            break;
        case 'f':
            options->calibration = optarg;
            break;
        case 'b':
            options->backend = optarg;
            break;
        default:
            fprintf(option == 'h' ? stdout : stderr,
                    "usage: oscar_demo [--json] [--backend auto|host|cuda] [--capture FILE] [--calibration FILE]\n"
                    "                  [--daemon PATH] [--oscarctl PATH] [--worker PATH]\n");
            return option == 'h' ? 1 : -1;
        }
    }
    return optind == argc ? 0 : -1;
}

static void set_up_signals(void) {
    /* Ctrl-C and a request to end must not leave a daemon or a directory behind: the scene breaks off, and run() cleans up. */
    struct sigaction action = {.sa_handler = scene_interrupt}; /* without SA_RESTART: poll() returns */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    /* Whatever a daemon leaves behind becomes our child, and is noticed below. */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

static bool no_process_is_left(void) {
    int status;
    pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid < 0 && errno == ECHILD)
        return true;
    fprintf(stderr, "demo: a process is left behind%s\n", pid > 0 ? " as a zombie" : "");
    return false;
}

static int64_t dense_page_bytes(const struct oscar_geometry *geometry) {
    return (int64_t)geometry->layers * geometry->kv_heads * geometry->head_dim * OSCAR_PAGE_TOKENS * 2 /* K, V */ * 2;
}

static int64_t file_bytes(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 ? status.st_size : 0;
}

/* One daemon, and all that happens on it, into `scene`. */
static int play(const struct options *options, const struct replay *replay, const char *calibration, char *settings,
                struct scene *scene) {
    *scene = (struct scene){.daemon = {.oscard = options->daemon, .oscarctl = options->oscarctl, .settings = settings},
                            .worker_program = options->worker,
                            .capture = options->capture,
                            .calibration = calibration,
                            .dense_page_bytes = dense_page_bytes(replay_geometry(replay))};
    int r = private_daemon_start(&scene->daemon);
    if (r == 0)
        r = scene_play(scene);
    if (private_daemon_stop(&scene->daemon) < 0)
        r = -1;
    scene_end(scene);
    private_daemon_end(&scene->daemon);
    return r;
}

/* `calibration` is an absolute path. */
static int run(const struct options *options, const struct replay *replay, const char *calibration) {
    const char *name = strrchr(calibration, '/') + 1;
    struct result result = {.calibration_bytes = file_bytes(calibration)};
    char *settings;
    if (asprintf(&settings, "[device]\nbackend = %s\n[memory]\n" MEMORY "[calibration]\ndirectory = %.*s\n",
                 options->backend, (int)(name - calibration), calibration) < 0)
        return EXIT_WRONG;
    int r = play(options, replay, name, settings, &result.fitted);
    if (r == 0)
        r = play(options, replay, NULL, settings, &result.hadamard);
    bool good = r == 0;
    if (good) {
        report_print(&result, replay);
        good = report_verdict(&result);
        if (options->json)
            report_print_json(&result);
    }
    scene_free(&result.hadamard);
    scene_free(&result.fitted);
    free(settings);
    return no_process_is_left() && good ? EXIT_SUCCESS : EXIT_WRONG;
}

int main(int argc, char **argv) {
    struct options options = {.backend = "auto",
                              .daemon = DEMO_DAEMON,
                              .oscarctl = DEMO_OSCARCTL,
                              .worker = DEMO_WORKER,
                              .capture = DEMO_CAPTURE,
                              .calibration = DEMO_CALIBRATION};
    int r = parse(argc, argv, &options);
    if (r != 0)
        return r > 0 ? EXIT_SUCCESS : EXIT_USAGE;
    set_up_signals();
    char why[256];
    struct replay *replay;
    if (replay_open(options.capture, &replay, why, sizeof(why)) < 0) {
        fprintf(stderr, "demo: %s\n", why);
        return EXIT_USAGE;
    }
    int status = EXIT_USAGE;
    char *calibration = realpath(options.calibration, NULL);
    if (calibration != NULL)
        status = run(&options, replay, calibration);
    else
        fprintf(stderr, "demo: cannot read %s: %m\n", options.calibration);
    free(calibration);
    replay_free(replay);
    return status;
}
