/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/config_table.h"

#include <stddef.h>

#include "proto/window.h"

static const char *const io_engines[] = {"auto", "io_uring", "epoll", NULL}; /* enum loop_engine */
static const char *const backends[] = {"auto", "host", "cuda", NULL};
static const char *const shares[] = {"auto", "vmm", "ipc", NULL};                    /* enum oscar_share */
static const char *const log_levels[] = {"error", "warning", "info", "debug", NULL}; /* enum log_level */
static const char *const log_formats[] = {"text", "json", NULL};                     /* enum log_format */
static const char *const default_tenants[] = {"uid", "shared", NULL};                /* enum config_default_tenant */

#define AT(field) offsetof(struct config, field)

const struct config_section config_sections[] = {
    {"daemon", "The process: its directory, its socket, its log."},
    {"device", "The accelerator whose memory holds the cache."},
    {"memory", "How much memory the cache may take."},
    {"pack", "Packing of pages that have left every recent window."},
    {"limits", "Bounds of what clients may hold."},
    {"calibration", "Rotations and clip ratios, made by oscar-calib."},
    {"tenants",
     "Who shares pages with whom. Pages are never shared between tenants. A client's tenant follows from its user\n"
     "id, as the kernel reports it. Beside the key below, a line gives users a tenant by name:\n"
     "    tenant.research = 1001,1002"},
    {"admin", "The sockets of oscarctl and of event subscribers. Who may reach them may flush the cache."},
};
const size_t config_sections_count = sizeof(config_sections) / sizeof(config_sections[0]);

const struct config_key config_keys[] = {
    {"daemon", "runtime_dir", "runtime-dir", CONFIG_TEXT, AT(runtime_dir), "",
     "$RUNTIME_DIRECTORY, else /run/oscard for root, else $XDG_RUNTIME_DIR/oscard", NULL, 0, 0,
     "Directory of the sockets. Made when only its last part is missing."},
    {"daemon", "socket", "socket", CONFIG_TEXT, AT(socket), "worker.sock", NULL, NULL, 1, 0,
     "Socket of the workers (Unix, SOCK_SEQPACKET). A relative path is in runtime_dir."},
    {"daemon", "socket_mode", NULL, CONFIG_MODE, AT(socket_mode), "0660", NULL, NULL, 0, 0777,
     "Mode of that socket: who may write to it may use the cache."},
    {"daemon", "socket_group", NULL, CONFIG_TEXT, AT(socket_group), "", "the group that oscard runs as", NULL, 0, 0,
     "Group of that socket, by name or number."},
    {"daemon", "io_engine", "io-engine", CONFIG_CHOICE, AT(io_engine), "auto", NULL, io_engines, 0, 0,
     "Event loop. auto takes io_uring and falls back to epoll where it is forbidden, with one line in the log;\n"
     "io_uring insists on it."},
    {"daemon", "log_level", NULL, CONFIG_CHOICE, AT(log_level), "info", NULL, log_levels, 0, 0,
     "The least important lines that are still written."},
    {"daemon", "log_format", NULL, CONFIG_CHOICE, AT(log_format), "text", NULL, log_formats, 0, 0,
     "One line an event, as text with key=value fields or as a JSON object."},
    {"daemon", "log_file", NULL, CONFIG_TEXT, AT(log_file), "", "stderr", NULL, 0, 0,
     "File to append to; SIGHUP opens it anew. A full disk costs lines, which are counted, and nothing else."},

    {"device", "backend", "backend", CONFIG_TEXT, AT(backend), "auto", NULL, backends, 1, 0,
     "host keeps pages in the machine's memory, cuda in that of an NVIDIA GPU; auto takes cuda where a GPU can be "
     "used,\n"
     "else host, and the log says why."},
    {"device", "id", "device", CONFIG_TEXT, AT(device), "", "the first GPU", NULL, 0, 0,
     "UUID of the GPU, as nvidia-smi -L prints it (GPU-...). Its number would change with CUDA_VISIBLE_DEVICES."},
    {"device", "share", "gpu-share", CONFIG_CHOICE, AT(share), "auto", NULL, shares, 0, 0,
     "How GPU memory goes to workers: vmm sends descriptors (readers cannot write, the memory outlives its owner); "
     "ipc\n"
     "the older handles, for systems without them: readers could write, and the memory dies with the daemon. auto "
     "takes\n"
     "vmm where it works."},
    {"device", "watchdog_seconds", NULL, CONFIG_COUNT, AT(watchdog_seconds), "60", NULL, NULL, 0, 86400,
     "A call that the device does not return from for so long ends the daemon with status 71; 0: never. Until then it\n"
     "answers whatever needs no device."},

    {"memory", "budget", "budget", CONFIG_SIZE, AT(budget), "25%", NULL, NULL, UINT64_C(1) << 20, 0,
     "Memory of all pages together, on whatever device serves: a size (64M, 40G), or a share of that device's memory\n"
     "(60%): of the machine's on the host backend, of the GPU's on cuda. More than the device has is refused."},
    {"memory", "gpu_memory", "gpu-memory", CONFIG_SIZE, AT(gpu_memory), "", "budget", NULL, UINT64_C(1) << 20, 0,
     "The same where a GPU serves, in place of budget: one file for machines with a GPU and without."},
    {"memory", "chunk", NULL, CONFIG_SIZE, AT(chunk), "", "by the budget", NULL, UINT64_C(1) << 20, UINT64_C(1) << 36,
     "What is asked from the device at once. Larger chunks are mapped faster, smaller ones waste less: each client has "
     "some\n"
     "of its own. By the budget: a 256th of it for packed pages, a 512th for dense ones, 64M at least. A chunk holds "
     "one\n"
     "page at least, and is between a 1024th and a 64th of the budget."},

    {"pack", "threads", NULL, CONFIG_COUNT, AT(pack_threads), "0", "0, for a quarter of the cores", NULL, 0, 256,
     "Threads that pack pages (on the host backend) and inspect them."},

    {"limits", "clients", NULL, CONFIG_COUNT, AT(clients), "1024", NULL, NULL, 1, 65536,
     "Clients at the same time. One more is refused in words."},
    {"limits", "sequences", NULL, CONFIG_COUNT, AT(sequences), "4096", NULL, NULL, 1, OSCAR_FENCE_SLOTS,
     "Open sequences of one connection."},
    {"limits", "leases", NULL, CONFIG_COUNT, AT(leases), "1024", NULL, NULL, 0, 1048576,
     "Open leases of one connection."},

    {"calibration", "directory", NULL, CONFIG_TEXT, AT(calibration_dir), "/var/lib/oscard/calibrations", NULL, NULL, 1,
     0,
     "Clients name a calibration by a file in this directory (NAME or NAME.safetensors) or by its digest (b2sum -l "
     "256)."},
    {"calibration", "max_context_tokens", NULL, CONFIG_COUNT, AT(max_context_tokens), "1048576", NULL, NULL,
     OSCAR_PAGE_TOKENS, OSCAR_MAX_SEQUENCE_TOKENS,
     "Longest position for which the tables of a calibration's rotating centre are made."},

    {"tenants", "default", NULL, CONFIG_CHOICE, AT(default_tenant), "uid", NULL, default_tenants, 0, 0,
     "Tenant of a user that no line names: uid gives each user one of their own (\"uid-1000\"), shared puts them all "
     "in\n"
     "one (\"shared\")."},

    {"admin", "requests", NULL, CONFIG_TEXT, AT(admin_requests), "admin.ipc", NULL, NULL, 1, 0,
     "Socket for requests (nanomsg REP over ipc). A relative path is in runtime_dir."},
    {"admin", "events", NULL, CONFIG_TEXT, AT(admin_events), "events.ipc", NULL, NULL, 1, 0,
     "Socket for events (nanomsg PUB over ipc)."},
    {"admin", "mode", NULL, CONFIG_MODE, AT(admin_mode), "0660", NULL, NULL, 0, 0777, "Mode of both."},
    {"admin", "group", NULL, CONFIG_TEXT, AT(admin_group), "", "the group that oscard runs as", NULL, 0, 0,
     "Group of both, by name or number."},
};
const size_t config_keys_count = sizeof(config_keys) / sizeof(config_keys[0]);
_Static_assert(sizeof(config_keys) / sizeof(config_keys[0]) <= CONFIG_MAX_KEYS, "origin[] is too small");
