/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes of a test: the program itself, started again in a role, and spoken to over a socket that also carries descriptors.
 * Nothing of the parent's device reaches the child. Whatever fails in the parent fails the test; a child that cannot go on
 * says why and ends.
 */
#ifndef OSCAR_TESTS_GPU_PROCESS_H
#define OSCAR_TESTS_GPU_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct process {
    pid_t pid;
    int socket;
};

struct process_message {
    char word[64]; /* what is asked or answered */
    uint64_t value, more;
    int fd; /* -1: none; the receiver closes it */
};

/* Starts the program as "NAME role", with these variables ("NAME=value") beside the parent's; NULL: none. */
struct process process_start(const char *role, const char *variable);
void process_send(const struct process *process, struct process_message message); /* does not take the descriptor */
/* The next message; fails when none comes within a minute, or when the process ends. */
struct process_message process_receive(const struct process *process);
/* One question and its answer. */
struct process_message process_ask(const struct process *process, struct process_message message);
/* True when the process ended without an answer to the last question; false when it answered. */
bool process_died(const struct process *process, struct process_message *ret_answer);
void process_kill(struct process *process); /* SIGKILL, and it is gone */
void process_end(
    struct process *process); /* closes the socket: the child leaves its loop; checks that it exits with 0 */

/* In a child: main gives its role to this. Each message goes to `serve`, whose result is the answer, until the parent closes.
 * Returns the exit status. */
int process_serve(struct process_message (*serve)(const struct process_message *message));
/* In a child: says why it cannot go on, and ends it. */
_Noreturn __attribute__((format(printf, 1, 2))) void process_give_up(const char *format, ...);

#endif
