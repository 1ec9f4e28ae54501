/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Error codes of oscard: the same on the wire, in the client library and in the daemon.
 *
 * A function that can fail returns 0 (or a count) on success and a negative `enum oscar_error` on failure. Outputs named
 * `ret_*` come last and are untouched on failure. What exactly went wrong is a text (oscar_error_detail() in oscar.h).
 */
#ifndef OSCAR_ERROR_H
#define OSCAR_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, text, remedy): values are part of the wire format and of the ABI; new ones go at the end. */
#define OSCAR_ERROR_TABLE(X)                                                                                           \
    X(INVALID, -1, "invalid argument", "see the call's documentation in oscar/oscar.h")                                \
    X(NO_MEMORY, -2, "out of process memory", "free memory in this process or raise its limit")                        \
    X(NO_SPACE, -3, "no space in the KV cache", "close sequences or leases, wait, or raise [memory] budget")           \
    X(TIMEOUT, -4, "deadline exceeded", "retry, or raise the client's timeout; is the daemon stopped or overloaded?")  \
    X(DISCONNECTED, -5, "connection to the daemon lost", "open the client again; see the daemon's log")                \
    X(NOT_RUNNING, -6, "no daemon at this socket", "start oscard, or name its socket (OSCAR_SOCKET)")                  \
    X(PROTOCOL, -7, "protocol violation", "client library and daemon disagree: update both; report a bug if it stays") \
    X(VERSION, -8, "protocol version not supported", "install a client library of the daemon's major version")         \
    X(UNSUPPORTED, -9, "not supported here", "use a supported size, type or backend, as the detail says")              \
    X(GEOMETRY, -10, "geometry not accepted", "correct the model's geometry as the detail says")                       \
    X(IDENTITY, -11, "model identity incomplete", "give every field of the model identity")                            \
    X(CALIBRATION, -12, "calibration not usable", "check the calibration file with the detail, or use the default")    \
    X(NOT_FINITE, -13, "K or V out of range", "K/V rows hold NaN, Inf or magnitudes over 65,000: check the worker")    \
    X(STALE, -14, "handle is stale", "the object was closed or replaced: open it again")                               \
    X(NOT_FOUND, -15, "no such object", "check the name or the handle")                                                \
    X(STATE, -16, "call not allowed in this state", "see the order of calls in oscar/oscar.h")                         \
    X(LIMIT, -17, "limit reached", "use fewer objects, or raise the limit in the daemon's configuration")              \
    X(PERMISSION, -18, "permission denied", "ask the operator for access to the socket or the tenant")                 \
    X(IO, -19, "input/output error", "see the detail; check the disk and the directory")                               \
    X(BUSY, -20, "already in use", "another daemon serves this socket: stop it or choose another path")                \
    X(DEVICE, -21, "device error", "start this process again; see the daemon's log; check driver and device")          \
    X(CONFIG, -22, "configuration not accepted", "correct the named key; oscard --check-config checks a file")         \
    X(CORRUPT, -23, "data is corrupt", "the file or record fails its checks: make it again")                           \
    X(INTERNAL, -24, "internal error", "this is a bug in oscard: please report it with the log")

enum oscar_error {
    OSCAR_OK = 0,
#define OSCAR_ERROR_ENUM(name, value, text, remedy) OSCAR_ERR_##name = value,
    OSCAR_ERROR_TABLE(OSCAR_ERROR_ENUM)
#undef OSCAR_ERROR_ENUM
};

/* Static texts, never NULL; "unknown error" for a value outside the table. */
const char *oscar_error_name(int error);   /* "NO_SPACE" */
const char *oscar_error_text(int error);   /* "no space in the KV cache" */
const char *oscar_error_remedy(int error); /* "close sequences ..." */

#ifdef __cplusplus
}
#endif
#endif
