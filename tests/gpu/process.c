/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/kernel_fixture.h"

#define CHILD_SOCKET 3
#define PATIENCE_MS 60000

static void send_message(int socket, const struct process_message *message) {
    struct iovec part = {.iov_base = (void *)(uintptr_t)message, .iov_len = sizeof(*message)};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (message->fd >= 0) {
        packet.msg_control = &control;
        packet.msg_controllen = sizeof(control);
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &message->fd, sizeof(int));
    }
    (void)sendmsg(socket, &packet, MSG_NOSIGNAL); /* who is gone is noticed when the answer is missing */
}

/* False at the end of the other side. */
static bool receive_message(int socket, struct process_message *ret) {
    struct iovec part = {.iov_base = ret, .iov_len = sizeof(*ret)};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr packet = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    if (recvmsg(socket, &packet, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof(*ret))
        return false;
    ret->fd = -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
    if (header && header->cmsg_type == SCM_RIGHTS)
        memcpy(&ret->fd, CMSG_DATA(header), sizeof(int));
    return true;
}

struct process process_start(const char *role, const char *variable) {
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    char *arguments[] = {(char *)(uintptr_t) "child", (char *)(uintptr_t)role, NULL};
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (variable)
            putenv((char *)(uintptr_t)variable);
        if (dup2(pair[1], CHILD_SOCKET) == CHILD_SOCKET && fcntl(CHILD_SOCKET, F_SETFD, 0) == 0)
            execv("/proc/self/exe", arguments);
        _exit(127);
    }
    close(pair[1]);
    return (struct process){.pid = pid, .socket = pair[0]};
}

void process_send(const struct process *process, struct process_message message) {
    send_message(process->socket, &message);
}

static bool receive_in_time(const struct process *process, struct process_message *ret) {
    struct pollfd wait = {.fd = process->socket, .events = POLLIN};
    if (poll(&wait, 1, PATIENCE_MS) != 1)
        fail_msg("process %d does not answer", (int)process->pid);
    return receive_message(process->socket, ret);
}

struct process_message process_receive(const struct process *process) {
    struct process_message message;
    if (!receive_in_time(process, &message))
        fail_msg("process %d ended instead of answering", (int)process->pid);
    return message;
}

struct process_message process_ask(const struct process *process, struct process_message message) {
    process_send(process, message);
    return process_receive(process);
}

bool process_died(const struct process *process, struct process_message *ret_answer) {
    return !receive_in_time(process, ret_answer);
}

void process_kill(struct process *process) {
    assert_int_equal(kill(process->pid, SIGKILL), 0);
    assert_int_equal(waitpid(process->pid, NULL, 0), process->pid);
    close(process->socket);
}

void process_end(struct process *process) {
    close(process->socket);
    int status;
    assert_int_equal(waitpid(process->pid, &status, 0), process->pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int process_serve(struct process_message (*serve)(const struct process_message *message)) {
    struct process_message message;
    while (receive_message(CHILD_SOCKET, &message)) {
        struct process_message answer = serve(&message);
        if (message.fd >= 0)
            close(message.fd);
        send_message(CHILD_SOCKET, &answer);
        if (answer.fd >= 0)
            close(answer.fd);
    }
    return 0;
}

void process_give_up(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "child %d: ", (int)getpid());
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    _exit(1);
}
