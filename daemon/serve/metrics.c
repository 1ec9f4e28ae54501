/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/serve/metrics.h"

#include <stddef.h>
#include <stdio.h>

#include "daemon/serve/state.h"

static uint64_t clients_now(const struct serve *serve) { return serve->clients; }

static uint64_t silent_now(const struct serve *serve) { return serve->silent_count; }

static uint64_t sessions_quarantined(const struct serve *serve) {
    uint64_t count = 0;
    for (const struct session *session = serve->sessions; session != NULL; session = session->next)
        count += session->link == NULL;
    return count;
}

static uint64_t device_bytes(const struct serve *serve) { return serve->device_bytes; }

static uint64_t descriptors_refused(const struct serve *serve) { return loop_descriptors_received(serve->loop); }

static uint64_t lines_dropped(const struct serve *serve) {
    (void)serve;
    return log_lines_dropped();
}

#define COUNTER(field) offsetof(struct serve, counters.field), NULL
#define VALUE(function) 0, function

/* One row a metric; `verb` rows are repeated a verb. */
static const struct {
    const char *name, *unit;
    bool counter, verbs;
    size_t offset;
    uint64_t (*value)(const struct serve *serve); /* NULL: at `offset` */
    const char *help;
} rows[] = {
    {"oscard_device_memory_bytes", "bytes", false, false, VALUE(device_bytes), "Memory of the device, whoever uses it"},
    {"oscard_clients", "connections", false, false, VALUE(clients_now), "Clients now"},
    {"oscard_clients_quarantined", "connections", false, false, VALUE(sessions_quarantined),
     "Ended connections whose process lives and may still read pages"},
    {"oscard_connections_silent", "connections", false, false, VALUE(silent_now),
     "Connections now that have not said hello: no clients yet"},
    {"oscard_connections_total", "connections", true, false, COUNTER(connections), "Connections accepted"},
    {"oscard_connections_refused_total", "connections", true, false, COUNTER(refused_clients),
     "Connections over [limits] clients"},
    {"oscard_connections_dropped_total", "connections", true, false, COUNTER(dropped_silent),
     "Connections that had not said hello when there was no room for others"},
    {"oscard_hello_total", "connections", true, false, COUNTER(hellos), "Clients greeted"},
    {"oscard_version_refused_total", "connections", true, false, COUNTER(version_refused),
     "Clients of another major version"},
    {"oscard_requests_total", "requests", true, true, COUNTER(requests), "Requests of workers"},
    {"oscard_request_errors_total", "requests", true, false, COUNTER(request_errors),
     "Requests answered with an error"},
    {"oscard_protocol_errors_total", "connections", true, false, COUNTER(protocol_errors),
     "Connections ended for a broken protocol"},
    {"oscard_queue_overflows_total", "connections", true, false, COUNTER(queue_overflows),
     "Connections cut off because they do not read"},
    {"oscard_descriptors_refused_total", "descriptors", true, false, VALUE(descriptors_refused),
     "Descriptors sent by clients, all closed"},
    {"oscard_chunks_announced_total", "chunks", true, false, COUNTER(chunks_announced),
     "Chunk descriptors sent to clients"},
    {"oscard_calibrations_loaded_total", "files", true, false, COUNTER(calibrations_loaded),
     "Calibration files read and verified"},
    {"oscard_admin_requests_total", "requests", true, false, COUNTER(admin_requests), "Administration requests"},
    {"oscard_events_total", "events", true, false, COUNTER(events), "Events published"},
    {"oscard_events_failed_total", "events", true, false, COUNTER(events_failed), "Events that could not be published"},
    {"oscard_log_lines_dropped_total", "lines", true, false, VALUE(lines_dropped),
     "Log lines that the disk or pipe did not take"},
    {"oscard_loop_turns_total", "turns", true, false, COUNTER(turns), "Wake-ups of the event loop"},
    {"oscard_loop_turn_max_ns", "ns", false, false, COUNTER(turn_ns_max),
     "Longest time that the event loop was busy at once"},
};

static void fill(struct oscar_metric *ret, size_t row, const char *labels, uint64_t value) {
    *ret = (struct oscar_metric){.counter = rows[row].counter, .value = value};
    snprintf(ret->name, sizeof(ret->name), "%s", rows[row].name);
    snprintf(ret->labels, sizeof(ret->labels), "%s", labels);
    snprintf(ret->unit, sizeof(ret->unit), "%s", rows[row].unit);
    snprintf(ret->help, sizeof(ret->help), "%s", rows[row].help);
}

/* Always 1: a dashboard joins the other series with its labels. */
static void fill_device(const struct serve *serve, struct oscar_metric *ret) {
    *ret = (struct oscar_metric){
        .value = 1, .unit = "devices", .name = "oscard_device_info", .help = "The device that serves"};
    snprintf(ret->labels, sizeof(ret->labels), "backend=\"%.16s\",device=\"%.64s\",share=\"%s\"", serve->ops->name,
             serve->ops->device_id(serve->device),
             serve->ops->device_share(serve->device) == OSCAR_SHARE_IPC ? "ipc" : "vmm");
}

uint32_t serve_metrics(const struct serve *serve, struct oscar_metric *ret, uint32_t capacity) {
    uint32_t count = 0;
    if (count < capacity)
        fill_device(serve, &ret[count++]);
    for (size_t row = 0; row < sizeof(rows) / sizeof(rows[0]); row++) {
        const uint64_t *values = (const uint64_t *)(const void *)((const char *)serve + rows[row].offset);
        if (!rows[row].verbs) {
            if (count < capacity)
                fill(&ret[count++], row, "", rows[row].value != NULL ? rows[row].value(serve) : *values);
            continue;
        }
        for (unsigned verb = OSCAR_HELLO; verb < OSCAR_VERBS; verb++) {
            char labels[64];
            snprintf(labels, sizeof(labels), "verb=\"%s\"", oscar_verb_name((enum oscar_verb)verb));
            if (count < capacity)
                fill(&ret[count++], row, labels, values[verb]);
        }
    }
    return count;
}
