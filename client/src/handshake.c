/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "client/src/client.h"
#include "client/src/detail.h"
#include "proto/version.h"

_Static_assert(sizeof(((struct oscar_client_info *)0)->backend) == OSCAR_NAME_BYTES, "names of the wire fit the API");

static int check_reply(const struct oscar_call *call) {
    const struct oscar_reply *reply = &call->reply;
    if (reply->hello.major != OSCAR_PROTOCOL_MAJOR)
        return oscar_fail(oscar_detail(), OSCAR_ERR_VERSION,
                          "the daemon (oscard %s) speaks protocol %" PRIu32 ", this library (liboscar %s) speaks %u",
                          reply->hello.version, reply->hello.major, oscar_version(), OSCAR_PROTOCOL_MAJOR);
    if (call->fds != 2)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL,
                          "hello: %u descriptors where window and fences are expected", call->fds);
    if (reply->hello.window_bytes < OSCAR_WINDOW_BYTES || reply->hello.fence_bytes < OSCAR_FENCE_BYTES)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL,
                          "hello: window of %" PRIu64 " bytes, fences of %" PRIu64 ": too small",
                          reply->hello.window_bytes, reply->hello.fence_bytes);
    return 0;
}

static int map_window(struct oscar_client *client, int fd) {
    void *memory;
    int r = oscar_map_descriptor(fd, OSCAR_WINDOW_BYTES, PROT_READ | PROT_WRITE, "window", &memory);
    if (r < 0)
        return r;
    client->window = memory;
    if (client->window->magic != OSCAR_WINDOW_MAGIC || client->window->version != OSCAR_WINDOW_VERSION)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "window of format %#" PRIx32 ", version %" PRIu32,
                          client->window->magic, client->window->version);
    oscar_connection_set_window(client->connection, client->window);
    return 0;
}

static int map_fences(struct oscar_client *client, int fd) {
    void *memory;
    int r = oscar_map_descriptor(fd, OSCAR_FENCE_BYTES, PROT_READ | PROT_WRITE, "fences", &memory);
    return r < 0 ? r : oscar_attachment_set_fences(client->attachment, memory);
}

/* Of two minor versions the lower one is spoken. */
static uint32_t lower(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void keep_info(struct oscar_client *client, const struct oscar_reply *reply) {
    struct oscar_client_info *info = &client->info;
    info->size = sizeof(*info);
    info->incarnation = reply->hello.incarnation;
    info->protocol_major = reply->hello.major;
    info->protocol_minor = lower(reply->hello.minor, OSCAR_PROTOCOL_MINOR);
    memcpy(info->backend, reply->hello.backend, sizeof(info->backend));
    memcpy(info->device, reply->hello.device, sizeof(info->device));
    memcpy(info->tenant, reply->hello.tenant, sizeof(info->tenant));
    memcpy(info->daemon_version, reply->hello.version, sizeof(info->daemon_version));
}

static int put_text(char ret[OSCAR_NAME_BYTES], const char *text, const char *what) {
    if (strlen(text) >= OSCAR_NAME_BYTES)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "%s has %zu bytes: at most %u", what, strlen(text),
                          OSCAR_NAME_BYTES - 1);
    (void)snprintf(ret, OSCAR_NAME_BYTES, "%s", text);
    return 0;
}

int oscar_handshake(struct oscar_client *client, const char *name, const char *group, uint64_t deadline) {
    _cleanup_call_ struct oscar_call *call = oscar_call_new(client->connection, OSCAR_HELLO);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    call->request.hello.major = OSCAR_PROTOCOL_MAJOR;
    call->request.hello.minor = OSCAR_PROTOCOL_MINOR;
    call->request.hello.features = OSCAR_FEATURES;
    int r = put_text(call->request.hello.client_name, name, "name");
    if (r == 0)
        r = put_text(call->request.hello.group, group, "group");
    if (r == 0)
        r = oscar_call_run(call, deadline);
    if (r == 0)
        r = check_reply(call);
    if (r == 0)
        r = map_window(client, call->fd[0]);
    if (r == 0)
        r = oscar_attachment_new(call->reply.hello.backend, call->reply.hello.device, &client->attachment);
    if (r == 0)
        r = map_fences(client, call->fd[1]);
    if (r == 0)
        keep_info(client, &call->reply);
    return r;
}
