/* SPDX-License-Identifier: Apache-2.0 */
/* Between the emulated language and instructions on one side and block.cc on the other: where a thread is, how threads meet, and
 * a block's memory. */
#ifndef OSCAR_TESTS_CUDA_EMULATION_BLOCK_H
#define OSCAR_TESTS_CUDA_EMULATION_BLOCK_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace emulated {

/* A line of a kernel's source. As a last parameter: the caller's. */
struct place {
    const char *file;
    int line;
};
#define EMULATED_PLACE const ::emulated::place &here = {__builtin_FILE(), __builtin_LINE()}

[[noreturn]] void fault(const place &here, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* --- threads that meet --- */

constexpr unsigned warp_lanes = 32;
constexpr size_t most_bytes = 64; /* that a lane brings or takes away */

struct exchange { /* of the running thread's warp */
    alignas(16) unsigned char in[warp_lanes * most_bytes], out[warp_lanes * most_bytes];
};
exchange &warp_exchange();
unsigned lane();

/* True for the last lane of the warp, which then calls warp_met(); the others return when it has. */
bool warp_meet(const char *what, const place &here);
void warp_met();
void block_meet(const place &here);

/* All lanes bring `in`; `all` makes out[0..31] of in[0..31]; each takes its own. */
template <class Out, class In, class All> Out together(const char *what, const place &here, const In &in, All all) {
    static_assert(sizeof(In) <= most_bytes && sizeof(Out) <= most_bytes, "what a lane has room for");
    exchange &exchange = warp_exchange();
    In *ins = reinterpret_cast<In *>(exchange.in);
    Out *outs = reinterpret_cast<Out *>(exchange.out);
    unsigned self = lane();
    ins[self] = in;
    if (warp_meet(what, here)) {
        all(const_cast<const In *>(ins), outs);
        warp_met();
    }
    return outs[self];
}

/* --- memory --- */

extern float half_values[1 << 16]; /* of all binary16 numbers: a multiplication of matrices needs many */

uint8_t *shared_memory();
uint32_t shared_offset(const void *pointer, const place &here);
/* Where the bytes of shared memory lie, which must be the block's, and aligned to `alignment`. */
uint8_t *shared_at(uint32_t address, size_t bytes, size_t alignment, const place &here);
/* The same for memory of the device. */
void check_global(const void *address, size_t bytes, size_t alignment, const place &here);

template <class T> T shared_load(uint32_t address, const place &here) {
    T value;
    memcpy(&value, shared_at(address, sizeof(T), sizeof(T), here), sizeof(T));
    return value;
}
template <class T> void shared_store(uint32_t address, T value, const place &here) {
    memcpy(shared_at(address, sizeof(T), sizeof(T), here), &value, sizeof(T));
}

/* --- asynchronous copies --- */

void copy_later(uint32_t to, const void *from, const place &here); /* 16 bytes, of the thread's group to come */
void copies_close();                                               /* that group */
void copies_finish(size_t pending);                                /* all but so many closed groups */
void copies_finish_all();

/* Barriers of bulk copies, 8 bytes of shared memory, for one arrival a phase. */
void copy_barrier_open(uint32_t address, const place &here);
void copy_barrier_expect(uint32_t address, uint32_t bytes, const place &here);
void copy_barrier_wait(uint32_t address, uint32_t parity, const place &here);
void copy_bulk_later(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, const place &here);

} // namespace emulated

#endif
