/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nanomsg's connect succeeds whether somebody listens or not, and a request then waits for its whole timeout. So the socket is
 * tried by hand before: who is not there is told at once.
 */
#include "client/ctl/admin.h"

#include <errno.h>
#include <limits.h>
#include <nanomsg/nn.h>
#include <nanomsg/pubsub.h>
#include <nanomsg/reqrep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/cleanup.h"

struct admin_subscription {
    int socket;
};

static void cleanup_socket(const int *socket) {
    if (*socket >= 0)
        (void)nn_close(*socket);
}

static void cleanup_message(void **message) {
    if (*message != NULL)
        (void)nn_freemsg(*message);
}

static int check_listener(const char *path, struct oscar_cause *cause) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(address.sun_path))
        return oscar_fail(cause, OSCAR_ERR_INVALID, "socket path of %zu bytes: at most %zu", strlen(path),
                          sizeof(address.sun_path) - 1);
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "socket: %m");
    if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0 || errno == EAGAIN)
        return 0;
    if (errno == EACCES || errno == EPERM)
        return oscar_fail(cause, OSCAR_ERR_PERMISSION, "%s: no access", path);
    return oscar_fail(cause, OSCAR_ERR_NOT_RUNNING, "%s: %s", path,
                      errno == ECONNREFUSED ? "nobody listens there" : strerror(errno));
}

static int open_socket(const char *path, int protocol, int *ret_socket, struct oscar_cause *cause) {
    int r = check_listener(path, cause);
    if (r < 0)
        return r;
    _cleanup_(cleanup_socket) int socket = nn_socket(AF_SP, protocol);
    if (socket < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "nanomsg socket: %s", nn_strerror(nn_errno()));
    char address[sizeof(((struct sockaddr_un *)NULL)->sun_path) + 8];
    (void)snprintf(address, sizeof(address), "ipc://%s", path);
    int most = OSCAR_MAX_ADMIN_BYTES;
    if (nn_setsockopt(socket, NN_SOL_SOCKET, NN_RCVMAXSIZE, &most, sizeof(most)) < 0 ||
        (protocol == NN_SUB && nn_setsockopt(socket, NN_SUB, NN_SUB_SUBSCRIBE, "", 0) < 0) ||
        nn_connect(socket, address) < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "%s: %s", path, nn_strerror(nn_errno()));
    *ret_socket = TAKE_FD(socket);
    return 0;
}

static int exchange(int socket, uint32_t timeout_ms, const uint8_t *bytes, size_t size, void **ret_message,
                    struct oscar_cause *cause) {
    int timeout = timeout_ms > INT_MAX ? INT_MAX : (int)timeout_ms, never = INT_MAX; /* a request is sent once */
    if (nn_setsockopt(socket, NN_SOL_SOCKET, NN_SNDTIMEO, &timeout, sizeof(timeout)) < 0 ||
        nn_setsockopt(socket, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout)) < 0 ||
        nn_setsockopt(socket, NN_REQ, NN_REQ_RESEND_IVL, &never, sizeof(never)) < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "nanomsg options: %s", nn_strerror(nn_errno()));
    int length = nn_send(socket, bytes, size, 0);
    if (length >= 0)
        length = nn_recv(socket, ret_message, NN_MSG, 0);
    if (length < 0 && (nn_errno() == ETIMEDOUT || nn_errno() == EAGAIN))
        return oscar_fail(cause, OSCAR_ERR_TIMEOUT, "no answer within %d ms", timeout);
    return length < 0 ? oscar_fail(cause, OSCAR_ERR_IO, "nanomsg: %s", nn_strerror(nn_errno())) : length;
}

int admin_ask(const struct ctl *ctl, const struct oscar_admin_request *request, struct oscar_admin_reply *ret,
              struct oscar_cause *cause) {
    struct oscar_admin_request numbered = *request;
    if (getrandom(&numbered.id, sizeof(numbered.id), GRND_NONBLOCK) < 0)
        numbered.id = (uint64_t)getpid(); /* it need not be secret, only unlike that of an earlier question */
    _cleanup_free_ uint8_t *bytes = NULL;
    size_t size;
    int r = oscar_admin_request_encode(&numbered, &bytes, &size);
    if (r < 0)
        return oscar_fail(cause, r, "the request cannot be encoded");
    _cleanup_(cleanup_socket) int socket = -1;
    r = open_socket(ctl->requests, NN_REQ, &socket, cause);
    if (r < 0)
        return r;
    _cleanup_(cleanup_message) void *message = NULL;
    int length = exchange(socket, ctl->timeout_ms, bytes, size, &message, cause);
    if (length < 0)
        return length;
    struct oscar_admin_reply reply;
    r = oscar_admin_reply_decode(message, (size_t)length, &reply, cause);
    if (r < 0)
        return r;
    if (reply.error == 0 && reply.id == numbered.id && reply.verb == numbered.verb) {
        *ret = reply;
        return 0;
    }
    r = reply.error < 0 ? oscar_fail(cause, reply.error, "%s", reply.cause)
                        : oscar_fail(cause, OSCAR_ERR_PROTOCOL, "the answer belongs to another question");
    oscar_admin_reply_free(&reply);
    return r;
}

int admin_subscribe(const struct ctl *ctl, struct admin_subscription **ret, struct oscar_cause *cause) {
    _cleanup_free_ struct admin_subscription *subscription = malloc(sizeof(*subscription));
    if (subscription == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a subscription");
    int r = open_socket(ctl->events, NN_SUB, &subscription->socket, cause);
    if (r < 0)
        return r;
    int forever = -1;
    (void)nn_setsockopt(subscription->socket, NN_SOL_SOCKET, NN_RCVTIMEO, &forever, sizeof(forever));
    *ret = TAKE_PTR(subscription);
    return 0;
}

void admin_unsubscribe(struct admin_subscription *subscription) {
    if (subscription == NULL)
        return;
    (void)nn_close(subscription->socket);
    free(subscription);
}

int admin_next_event(struct admin_subscription *subscription, struct oscar_event *ret, struct oscar_cause *cause) {
    _cleanup_(cleanup_message) void *message = NULL;
    int length;
    do
        length = nn_recv(subscription->socket, (void *)&message, NN_MSG, 0);
    while (length < 0 && nn_errno() == EINTR);
    if (length < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "receiving events: %s", nn_strerror(nn_errno()));
    return oscar_event_decode(message, (size_t)length, ret, cause);
}
