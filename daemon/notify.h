/* SPDX-License-Identifier: Apache-2.0 */
/* Tells the service manager how the daemon is (sd_notify's protocol: one datagram to $NOTIFY_SOCKET). */
#ifndef OSCAR_DAEMON_NOTIFY_H
#define OSCAR_DAEMON_NOTIFY_H

#include <stdint.h>

/* `state` as in sd_notify(3), like "READY=1\nSTATUS=..."; without $NOTIFY_SOCKET it does nothing. Never blocks. */
void notify_send(const char *state);
/* How often the manager wants to hear WATCHDOG=1 from this process, or 0. */
uint64_t notify_watchdog_ns(void);

#endif
