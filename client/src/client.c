/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/client.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/src/detail.h"
#include "client/src/model.h"
#include "client/src/options.h"
#include "proto/cleanup.h"

#define SYSTEM_SOCKET "/run/oscard/worker.sock"

int oscar_client_check(const struct oscar_client *client) {
    if (client == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "client: NULL");
    if (getpid() != client->pid)
        return oscar_fail(oscar_detail(), OSCAR_ERR_STATE,
                          "this process was forked from %ld, which opened the client: open one of its own",
                          (long)client->pid);
    return 0;
}

uint64_t oscar_client_deadline(const struct oscar_client *client) {
    return oscar_deadline_ns(atomic_load_explicit(&client->timeout_ms, memory_order_relaxed));
}

/* A socket that is named must be there; of the usual places, the first that has one. */
static int connect_somewhere(const char *path, uint64_t deadline, int *ret_socket) {
    const char *named = getenv("OSCAR_SOCKET");
    if (path == NULL && named != NULL && named[0] != '\0')
        path = named;
    if (path != NULL)
        return oscar_socket_connect(path, deadline, ret_socket);
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    if (runtime != NULL && runtime[0] != '\0') {
        _cleanup_free_ char *own = NULL;
        if (asprintf(&own, "%s/oscard/worker.sock", runtime) < 0) {
            own = NULL;
            return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a path");
        }
        if (access(own, F_OK) == 0 || access(SYSTEM_SOCKET, F_OK) != 0)
            return oscar_socket_connect(own, deadline, ret_socket);
    }
    return oscar_socket_connect(SYSTEM_SOCKET, deadline, ret_socket);
}

static void client_free(struct oscar_client *client) {
    oscar_connection_free(client->connection);
    if (client->attachment != NULL)
        oscar_retired_sweep(client->attachment);
    oscar_attachment_unref(client->attachment);
    if (client->window != NULL)
        (void)munmap(client->window, OSCAR_WINDOW_BYTES);
    oscar_mappings_destroy(&client->mappings);
    pthread_mutex_destroy(&client->lock);
    free(client);
}

static void cleanup_client(struct oscar_client **client) {
    if (*client != NULL)
        client_free(*client);
}

int oscar_client_open(const struct oscar_client_options *options, struct oscar_client **ret_client) {
    static const struct oscar_client_options usual = {.size = sizeof(usual)};
    struct oscar_client_options given;
    int r = oscar_options_read(options != NULL ? options : &usual, sizeof(given.size), sizeof(given),
                               "oscar_client_options", &given);
    if (r < 0)
        return r;
    if (ret_client == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "ret_client: NULL");
    _cleanup_(cleanup_client) struct oscar_client *client = calloc(1, sizeof(*client));
    if (client == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a client");
    client->pid = getpid();
    pthread_mutex_init(&client->lock, NULL);
    oscar_mappings_init(&client->mappings);
    oscar_client_set_timeout(client, given.timeout_ms);

    uint64_t deadline = oscar_client_deadline(client);
    int socket;
    r = connect_somewhere(given.socket, deadline, &socket);
    if (r == 0)
        r = oscar_connection_new(socket, &client->connection);
    if (r < 0)
        return r;
    oscar_connection_set_notice(client->connection, oscar_mappings_notice, &client->mappings);
    r = oscar_handshake(client, given.name != NULL ? given.name : program_invocation_short_name,
                        given.group != NULL ? given.group : "", deadline);
    if (r < 0)
        return r;
    oscar_descriptors_make_room();
    *ret_client = TAKE_PTR(client);
    return 0;
}

void oscar_client_close(struct oscar_client *client) {
    if (client == NULL)
        return;
    if (getpid() != client->pid) {
        /* A forked child: other threads of the parent may have held any lock at the fork, and the streams are not here. Only
         * the descriptor is given up, so that the daemon sees the parent's end when it comes. */
        oscar_connection_close_fd(client->connection);
        return;
    }
    /* The end of the connection would close all this too, but says nothing of streams: until the process has exited the daemon
     * would have to take it that they still use the pages. */
    uint64_t deadline = oscar_client_deadline(client);
    while (client->models != NULL)
        oscar_model_end(client->models, deadline);
    client_free(client);
}

void oscar_client_set_timeout(struct oscar_client *client, uint32_t timeout_ms) {
    if (client != NULL)
        atomic_store_explicit(&client->timeout_ms, timeout_ms > 0 ? timeout_ms : OSCAR_DEFAULT_TIMEOUT_MS,
                              memory_order_relaxed);
}

int oscar_client_info(const struct oscar_client *client, struct oscar_client_info *ret_info) {
    int r = oscar_client_check(client);
    return r < 0 ? r : oscar_info_write(&client->info, sizeof(client->info), "oscar_client_info", ret_info);
}

int oscar_client_ping(struct oscar_client *client) {
    int r = oscar_client_check(client);
    if (r < 0)
        return r;
    _cleanup_call_ struct oscar_call *call = oscar_call_new(client->connection, OSCAR_PING);
    return call != NULL ? oscar_call_run(call, oscar_client_deadline(client)) : OSCAR_ERR_NO_MEMORY;
}
