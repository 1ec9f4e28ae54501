/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA backend, measured on this machine's GPU: floors and BF16 baselines first, then store, pack and attention in relation to
 * them. What several processes do together is gpu_share's part.
 *
 * usage: gpu_bench [--json] [MODULE ...]     some of baselines, store, pack, decode, prefill (all of them when none is named)
 *
 * OSCAR_COMMIT names the commit that the program was built from.
 */
#include "tests/bench/gpu_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/bench/gpu_baselines.h"

static void run_baselines(struct gpu_bench *bench) { gpu_baselines_measure(bench->report); }

static const struct module {
    const char *name;
    void (*run)(struct gpu_bench *bench);
} modules[] = {
    {"baselines", run_baselines}, {"store", bench_gpu_store},     {"pack", bench_gpu_pack},
    {"decode", bench_gpu_decode}, {"prefill", bench_gpu_prefill},
};

/* What the figures are of. */
static void note_machine(struct gpu_bench *bench) {
    char driver[64] = "unknown", date[16];
    FILE *file = fopen("/sys/module/nvidia/version", "re");
    if (file != NULL && fscanf(file, "%63s", driver) != 1)
        strcpy(driver, "unknown");
    if (file != NULL)
        fclose(file);
    time_t now = time(NULL);
    strftime(date, sizeof(date), "%Y-%m-%d", gmtime(&now));
    const char *commit = getenv("OSCAR_COMMIT");
    report_note(bench->report, "gpu", bench->ops->device_summary(bench->device));
    report_note(bench->report, "driver", driver);
    report_note(bench->report, "date", date);
    report_note(bench->report, "commit", commit != NULL ? commit : "unknown");
}

static bool is_wanted(const char *name, int argc, char **argv) {
    bool any = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], name) == 0)
            return true;
        any = any || strcmp(argv[i], "--json") != 0;
    }
    return !any;
}

static bool is_known(const char *argument) {
    bool known = strcmp(argument, "--json") == 0;
    for (size_t i = 0; i < sizeof(modules) / sizeof(modules[0]); i++)
        known = known || strcmp(argument, modules[i].name) == 0;
    return known;
}

int main(int argc, char **argv) {
    bool json = false;
    for (int i = 1; i < argc; i++) {
        json = json || strcmp(argv[i], "--json") == 0;
        if (!is_known(argv[i])) {
            fprintf(stderr, "usage: gpu_bench [--json] [baselines] [store] [pack] [decode] [prefill]\n");
            return 2;
        }
    }
    struct gpu_bench bench = {.report = NULL};
    gpu_open(&bench);
    bench.report = report_new("gpu", json);
    note_machine(&bench);
    bench_gpu_floor(&bench);
    for (size_t i = 0; i < sizeof(modules) / sizeof(modules[0]); i++)
        if (is_wanted(modules[i].name, argc, argv))
            modules[i].run(&bench);
    gpu_close(&bench);
    return report_finish(bench.report);
}
