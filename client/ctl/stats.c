/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics: a table for people, in groups; one JSON object, series by series, for programs. */
#include <stdio.h>
#include <string.h>

#include "client/ctl/admin.h"
#include "proto/cleanup.h"

#define SERIES_BYTES (2 * OSCAR_NAME_BYTES + 4)
#define OTHERS (sizeof(groups) / sizeof(groups[0]) - 1)

/* A metric belongs to the first group with a prefix of its name. */
static const struct {
    const char *title;
    const char *prefixes[8];
} groups[] = {
    {"memory", {"oscar_memory_", "oscar_metadata_"}},
    {"pages", {"oscar_pages", "oscar_pack_"}},
    {"look-ups",
     {"oscar_prefix_cache_", "oscar_sequence_open", "oscar_probes", "oscar_forks", "oscar_flight_", "oscar_no_space"}},
    {"in use", {"oscar_models", "oscar_clients", "oscar_sequences", "oscar_leases"}},
    {"server", {"oscard_"}},
    {"others", {""}},
};

static size_t group_of(const char *name) {
    for (size_t group = 0; group < OTHERS; group++)
        for (size_t i = 0; i < sizeof(groups[group].prefixes) / sizeof(groups[group].prefixes[0]); i++) {
            const char *prefix = groups[group].prefixes[i];
            if (prefix != NULL && strncmp(name, prefix, strlen(prefix)) == 0)
                return group;
        }
    return OTHERS;
}

static void series_name(const struct oscar_metric *metric, char ret[SERIES_BYTES]) {
    if (metric->labels[0] != '\0')
        (void)snprintf(ret, SERIES_BYTES, "%s{%s}", metric->name, metric->labels);
    else
        (void)snprintf(ret, SERIES_BYTES, "%s", metric->name);
}

/* --- for programs ------------------------------------------------------------------------------------------------- */

static int add_to(json_t *object, const char *key, uint64_t value) {
    json_int_t sum = (json_int_t)value;
    const json_t *there = json_object_get(object, key);
    return json_object_set_new(object, key, json_integer(there != NULL ? sum + json_integer_value(there) : sum));
}

/* {"name{labels}": value, ...}; the name alone stands for the sum of its series. */
static json_t *as_json(const struct oscar_admin_reply *reply) {
    json_t *object = json_object();
    for (uint32_t i = 0; object != NULL && i < reply->metrics; i++) {
        const struct oscar_metric *metric = &reply->metric[i];
        char series[SERIES_BYTES];
        series_name(metric, series);
        if (add_to(object, metric->name, metric->value) < 0 ||
            (metric->labels[0] != '\0' &&
             json_object_set_new(object, series, json_integer((json_int_t)metric->value)) < 0)) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

/* --- for people --------------------------------------------------------------------------------------------------- */

static uint64_t sum_of(const struct oscar_admin_reply *reply, const char *name) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < reply->metrics; i++)
        if (strcmp(reply->metric[i].name, name) == 0)
            sum += reply->metric[i].value;
    return sum;
}

static void print_hit_rate(const struct oscar_admin_reply *reply, int width) {
    uint64_t asked = sum_of(reply, "oscar_prefix_cache_queries_total"),
             found = sum_of(reply, "oscar_prefix_cache_hits_total");
    if (asked > 0)
        printf("  %-*s  %16.1f %%  Tokens found of those looked up\n", width, "hit rate",
               100.0 * (double)found / (double)asked);
}

static void print_group(const struct oscar_admin_reply *reply, size_t group, int width) {
    bool titled = false;
    for (uint32_t i = 0; i < reply->metrics; i++) {
        const struct oscar_metric *metric = &reply->metric[i];
        if (group_of(metric->name) != group)
            continue;
        char series[SERIES_BYTES], value[CTL_VALUE_BYTES];
        series_name(metric, series);
        ctl_format_value(metric->value, metric->unit, value);
        printf("%s%s%s  %-*s  %18s  %s\n",
               titled      ? ""
               : group > 0 ? "\n"
                           : "",
               titled ? "" : groups[group].title, titled ? "" : "\n", width, series, value, metric->help);
        titled = true;
    }
    if (titled && strcmp(groups[group].title, "look-ups") == 0)
        print_hit_rate(reply, width);
}

static void print_table(const struct oscar_admin_reply *reply) {
    int width = 0;
    for (uint32_t i = 0; i < reply->metrics; i++) {
        char series[SERIES_BYTES];
        series_name(&reply->metric[i], series);
        if ((int)strlen(series) > width)
            width = (int)strlen(series);
    }
    for (size_t group = 0; group <= OTHERS; group++)
        print_group(reply, group, width);
}

int ctl_stats(const struct ctl *ctl, struct oscar_cause *cause) {
    _cleanup_(oscar_admin_reply_free) struct oscar_admin_reply reply = {0};
    const struct oscar_admin_request request = {.verb = OSCAR_ADMIN_STATS};
    int r = admin_ask(ctl, &request, &reply, cause);
    if (r < 0)
        return r;
    if (ctl->json)
        return ctl_print_json(as_json(&reply), cause);
    print_table(&reply);
    return 0;
}
