/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/metrics.h"

#include <stdio.h>

#include "daemon/store/state.h"

/* A function for each row: the compiler checks what a table of offsets would not. */
#define VALUE(function, expression)                                                                                    \
    static uint64_t function(const struct store *store) { return expression; }

VALUE(pages_sink, store->form_pages[OSCAR_FORM_SINK])
VALUE(pages_dense, store->form_pages[OSCAR_FORM_DENSE])
VALUE(pages_packed, store->form_pages[OSCAR_FORM_PACKED])
VALUE(pages_unlinked, store->meta.nodes_live - store->linked)
VALUE(used_sink, store->memory.used_bytes[OSCAR_FORM_SINK])
VALUE(used_dense, store->memory.used_bytes[OSCAR_FORM_DENSE])
VALUE(used_packed, store->memory.used_bytes[OSCAR_FORM_PACKED])
VALUE(chunks_sink, store->memory.chunk_bytes[OSCAR_FORM_SINK])
VALUE(chunks_dense, store->memory.chunk_bytes[OSCAR_FORM_DENSE])
VALUE(chunks_packed, store->memory.chunk_bytes[OSCAR_FORM_PACKED])
VALUE(moving, store->memory.making_bytes + store->memory.freeing_bytes)
VALUE(quarantined, store->memory.quarantined_bytes)
VALUE(budget, store->memory.options.budget_bytes)
VALUE(evictable, store->heap.count)
VALUE(metadata, meta_bytes(&store->meta) + table_bytes(&store->table) + store->heap.capacity * sizeof(uint32_t) +
                    store->pack_queue.capacity * sizeof(uint32_t))
VALUE(models, store->models.capacity - store->models.frees)
VALUE(clients, store->client_count)
VALUE(sequences, store->seqs.capacity - store->seqs.frees)
VALUE(leases, store->leases.capacity - store->leases.frees)
VALUE(opens, store->count.opens)
VALUE(open_hits, store->count.open_hits)
VALUE(queried, store->count.queried_tokens)
VALUE(hits, store->count.hit_tokens)
VALUE(probes, store->count.probes)
VALUE(forks, store->count.forks)
VALUE(seals, store->count.seals)
VALUE(duplicates, store->count.duplicates)
VALUE(inspect_failures, store->count.inspect_failures)
VALUE(packs, store->count.packs)
VALUE(pack_failures, store->count.pack_failures)
VALUE(pack_waiting, store->pack_waiting)
VALUE(evictions, store->count.evictions)
VALUE(flushed, store->count.flushed)
VALUE(no_space, store->count.no_space)
VALUE(flight_waits, store->count.flight_waits)
VALUE(flight_timeouts, store->count.flight_timeouts)

static uint64_t waiting(const struct store *store) {
    uint64_t count = 0;
    const struct seq *seq;
    TAILQ_FOREACH(seq, &store->waiting, in_wait) { count += seq->wait == WAIT_FLIGHT; }
    return count;
}

/* Whatever is closed stays watched until it has ended. */
static uint64_t ending(const struct store *store) {
    uint64_t count = 0;
    const struct seq *seq;
    TAILQ_FOREACH(seq, &store->watched, in_watch) { count += seq->closing; }
    return count;
}

#define SINK "form=\"sink\""
#define DENSE "form=\"dense\""
#define PACKED "form=\"packed\""

const struct store_metric store_metric_table[] = {
    {"oscar_pages", SINK, "pages", "Sealed pages by the form in which they serve", false, pages_sink},
    {"oscar_pages", DENSE, "pages", "Sealed pages by the form in which they serve", false, pages_dense},
    {"oscar_pages", PACKED, "pages", "Sealed pages by the form in which they serve", false, pages_packed},
    {"oscar_pages_deferred", "", "pages", "Pages that a flush removed from look-up and readers still hold", false,
     pages_unlinked},
    {"oscar_pages_evictable", "", "pages", "Pages that could be evicted at once", false, evictable},
    {"oscar_pages_waiting_for_packing", "", "pages", "Dense pages queued for packing", false, pack_waiting},
    {"oscar_memory_budget_bytes", "", "bytes", "Device memory that all chunks together may take", false, budget},
    {"oscar_memory_chunk_bytes", SINK, "bytes", "Device memory allocated in chunks", false, chunks_sink},
    {"oscar_memory_chunk_bytes", DENSE, "bytes", "Device memory allocated in chunks", false, chunks_dense},
    {"oscar_memory_chunk_bytes", PACKED, "bytes", "Device memory allocated in chunks", false, chunks_packed},
    {"oscar_memory_moving_bytes", "", "bytes", "Device memory that is being allocated or given back", false, moving},
    {"oscar_memory_used_bytes", SINK, "bytes", "Device memory of slots in use", false, used_sink},
    {"oscar_memory_used_bytes", DENSE, "bytes", "Device memory of slots in use", false, used_dense},
    {"oscar_memory_used_bytes", PACKED, "bytes", "Device memory of slots in use", false, used_packed},
    {"oscar_memory_quarantined_bytes", "", "bytes", "Device memory that a process that is ending may still write",
     false, quarantined},
    {"oscar_metadata_bytes", "", "bytes", "Process memory of the page tree and its indexes", false, metadata},
    {"oscar_models", "", "models", "Models known", false, models},
    {"oscar_clients", "", "clients", "Connections, those included whose process is ending", false, clients},
    {"oscar_sequences", "", "sequences", "Open sequences", false, sequences},
    {"oscar_sequences_ending", "", "sequences", "Closed sequences whose pages are still to be sealed, or read", false,
     ending},
    {"oscar_leases", "", "leases", "Open leases", false, leases},
    {"oscar_sequence_opens_total", "", "sequences", "Sequences opened", true, opens},
    {"oscar_sequence_open_hits_total", "", "sequences", "Sequences opened with at least one page found", true,
     open_hits},
    {"oscar_prefix_cache_queries_total", "", "tokens", "Tokens looked up by opens", true, queried},
    {"oscar_prefix_cache_hits_total", "", "tokens", "Tokens found by opens and extends", true, hits},
    {"oscar_probes_total", "", "probes", "Probes answered", true, probes},
    {"oscar_forks_total", "", "sequences", "Sequences made by forks", true, forks},
    {"oscar_pages_sealed_total", "", "pages", "Pages published as new", true, seals},
    {"oscar_pages_deduplicated_total", "", "pages", "Pages computed that were there already", true, duplicates},
    {"oscar_pages_rejected_total", "", "pages", "Pages that did not pass the inspection", true, inspect_failures},
    {"oscar_pages_packed_total", "", "pages", "Pages given their final form, INT2 or sink", true, packs},
    {"oscar_pack_failures_total", "", "pages", "Pages whose packing failed", true, pack_failures},
    {"oscar_pages_evicted_total", "", "pages", "Pages removed to make room", true, evictions},
    {"oscar_pages_flushed_total", "", "pages", "Pages removed by flushes", true, flushed},
    {"oscar_no_space_total", "", "requests", "Requests answered with no space", true, no_space},
    {"oscar_flight_waiting", "", "sequences", "Sequences waiting for a prefix that another one computes", false,
     waiting},
    {"oscar_flight_waits_total", "", "requests", "Waits for a prefix that another sequence computes", true,
     flight_waits},
    {"oscar_flight_timeouts_total", "", "requests", "Such waits that ran out of time", true, flight_timeouts},
};

const uint32_t store_metric_count = sizeof store_metric_table / sizeof *store_metric_table;

uint32_t store_metrics(const struct store *store, struct oscar_metric *ret, uint32_t capacity) {
    uint32_t count = store_metric_count < capacity ? store_metric_count : capacity;
    for (uint32_t i = 0; i < count; i++) {
        const struct store_metric *metric = &store_metric_table[i];
        ret[i] = (struct oscar_metric){.counter = metric->counter, .value = metric->value(store)};
        (void)snprintf(ret[i].name, sizeof ret[i].name, "%s", metric->name);
        (void)snprintf(ret[i].labels, sizeof ret[i].labels, "%s", metric->labels);
        (void)snprintf(ret[i].unit, sizeof ret[i].unit, "%s", metric->unit);
        (void)snprintf(ret[i].help, sizeof ret[i].help, "%s", metric->help);
    }
    return count;
}
