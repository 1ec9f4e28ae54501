/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A record as recvmsg() fills it in. The input begins with how it came: flags, how much the reported length differs from the record,
 * and control messages (type, number of descriptors, bytes beyond them); the rest is the record. Descriptors are real: none may be lost,
 * none closed that is handed on.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/frame.h"
#include "tests/fuzz/fuzz.h"

#define MAX_CONTROLS 4U
#define KERNEL_MAX_FDS 253U

struct arrival {
    _Alignas(struct cmsghdr) uint8_t control[MAX_CONTROLS * CMSG_SPACE(sizeof(int) * KERNEL_MAX_FDS + 3)];
    size_t control_bytes;
    int fd[KERNEL_MAX_FDS];
    unsigned fds;
};

static const uint8_t *take(const uint8_t **bytes, size_t *size, size_t count) {
    static const uint8_t zeros[4];
    if (*size < count)
        return zeros;
    const uint8_t *taken = *bytes;
    *bytes += count;
    *size -= count;
    return taken;
}

/* One control message; those with descriptors have new ones. */
static void put_control(struct arrival *arrival, uint8_t type, uint8_t wanted, uint8_t beyond) {
    static const struct {
        int level, type;
    } kinds[] = {{SOL_SOCKET, SCM_RIGHTS}, {SOL_SOCKET, SCM_CREDENTIALS}, {SOL_SOCKET, 0}, {0, SCM_RIGHTS}};
    const size_t kind = type % (sizeof(kinds) / sizeof(kinds[0]));
    unsigned count = wanted;
    if (count > KERNEL_MAX_FDS - arrival->fds)
        count = KERNEL_MAX_FDS - arrival->fds;
    size_t bytes = count * sizeof(int) + beyond % sizeof(int);
    struct cmsghdr header = {
        .cmsg_len = CMSG_LEN(bytes), .cmsg_level = kinds[kind].level, .cmsg_type = kinds[kind].type};
    uint8_t *at = arrival->control + arrival->control_bytes;
    memset(at, 0, CMSG_SPACE(bytes));
    memcpy(at, &header, sizeof(header));
    arrival->control_bytes += CMSG_SPACE(bytes);
    for (unsigned i = 0; i < count && kind == 0; i++) {
        int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        FUZZ_REQUIRE(fd >= 0);
        memcpy(at + CMSG_LEN(0) + i * sizeof(int), &fd, sizeof(int));
        arrival->fd[arrival->fds++] = fd;
    }
}

static void require_open(const struct arrival *arrival, int open) {
    for (unsigned i = 0; i < arrival->fds; i++)
        FUZZ_REQUIRE((fcntl(arrival->fd[i], F_GETFD) >= 0) == open);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static struct arrival arrival;
    arrival.control_bytes = arrival.fds = 0;
    const uint8_t *how = take(&bytes, &size, 3);
    unsigned controls = how[2] % (MAX_CONTROLS + 1);
    for (unsigned i = 0; i < controls; i++) {
        const uint8_t *control = take(&bytes, &size, 3);
        put_control(&arrival, control[0], control[1], control[2]);
    }
    size_t length = how[1] == 255 ? 0 : size + how[1] % 8;
    struct iovec iov = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    struct msghdr message = {
        .msg_iov = &iov,
        .msg_iovlen = (how[0] & 4) != 0 ? 0 : 1,
        .msg_control = controls > 0 ? arrival.control : NULL,
        .msg_controllen = arrival.control_bytes,
        .msg_flags = ((how[0] & 1) != 0 ? MSG_TRUNC : 0) | ((how[0] & 2) != 0 ? MSG_CTRUNC : 0),
    };
    struct oscar_record record;
    struct oscar_cause cause = {0};
    int r = oscar_record_parse(&message, length, &record, &cause);
    if (r < 0) {
        FUZZ_REQUIRE(r == OSCAR_ERR_PROTOCOL || (r == OSCAR_ERR_DISCONNECTED && length == 0));
        FUZZ_REQUIRE(cause.text[0] != '\0');
        require_open(&arrival, 0);
        return 0;
    }
    uint8_t header[OSCAR_RECORD_HEADER_BYTES];
    oscar_record_header(header, record.kind, record.fds, record.payload_bytes);
    FUZZ_REQUIRE(memcmp(header, bytes, sizeof(header)) == 0);
    FUZZ_REQUIRE(record.payload == bytes + sizeof(header) && record.payload_bytes == size - sizeof(header));
    FUZZ_REQUIRE(record.fds == arrival.fds && memcmp(record.fd, arrival.fd, arrival.fds * sizeof(int)) == 0);
    require_open(&arrival, 1);
    oscar_record_close_fds(&record);
    require_open(&arrival, 0);
    return 0;
}
