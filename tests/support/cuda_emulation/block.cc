/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks: their threads as fibers, their shared memory, their copies. All state is global: one launch runs at a time. */
#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <vector>

#include "proto/half.h"
#include "tests/support/cuda_emulation/emulation.h"
#include "tests/support/cuda_emulation/language.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

struct uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

#define MOST_THREADS 1024U
#define STACK_BYTES ((size_t)256 << 10)
#define GUARD_BYTES ((size_t)4096)
#define MOST_SHARED_BYTES ((size_t)256 << 10)
#define FIRST_SHARED_ADDRESS 1024U /* what lies below is the system's on the device, too */
#define POISON 0xFF                /* NaN in floats of every width */

enum state { READY, IN_WARP, IN_BLOCK, AT_COPY, ENDED };
static const char *const state_names[] = {"running", "waits for its warp", "waits for its block", "waits for a copy",
                                          "has ended"};

struct copy {
    uint8_t *to;
    const void *from;
    uint32_t bytes, barrier;
};

struct thread {
    void *stack_pointer, *stack;
    enum state state;
    const char *what; /* for which it waits, */
    place where;
    uint32_t barrier, parity; /* of a copy */
    struct uint3 index;
    std::vector<copy> copies;
    std::vector<size_t> groups; /* copies in each closed one, oldest first */
    void *asan_stack;
};

struct warp {
    unsigned arrived;
    const char *what; /* where those that arrived did */
    place where;
    struct exchange exchange;
};

float half_values[1 << 16];

static std::mutex one_launch;
static const struct emulated_launch *launch;
static struct thread threads[MOST_THREADS];
static struct warp warps[MOST_THREADS / warp_lanes];
static unsigned thread_count, warp_count;
static struct thread *self;
static unsigned live, waiting; /* threads that have not ended; of them, those at the block's barrier */
static void *scheduler;        /* its stack pointer */
static uint8_t *shared;
static std::vector<copy> bulk_copies; /* not done, oldest first */
static std::mt19937_64 source;

void fault(const place &here, const char *format, ...) {
    fprintf(stderr, "%s:%d: emulated kernel %s, block (%u, %u, %u), thread %u: ", here.file, here.line,
            launch->kernel->name, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

/* --- fibers --- */

/* Saves what a function must keep on the stack that it leaves, and takes it from the one that it enters. */
extern "C" void emulation_switch(void **ret_left, void *entered);
__asm__(".text\n"
        ".type emulation_switch, @function\n"
        "emulation_switch:\n"
        "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n"
        "    ret\n"
        ".size emulation_switch, . - emulation_switch\n");

#ifdef __SANITIZE_ADDRESS__
static const void *scheduler_stack;
static size_t scheduler_bytes;
static void *scheduler_asan;
static void leave(void **kept, const void *stack, size_t bytes) { __sanitizer_start_switch_fiber(kept, stack, bytes); }
static void enter(void *kept, const void **ret_stack, size_t *ret_bytes) {
    __sanitizer_finish_switch_fiber(kept, ret_stack, ret_bytes);
}
#define LEAVE_TO_THREAD(thread) leave(&scheduler_asan, (thread).stack, STACK_BYTES)
#define BACK_IN_SCHEDULER() enter(scheduler_asan, nullptr, nullptr)
#define LEAVE_TO_SCHEDULER(kept) leave(kept, scheduler_stack, scheduler_bytes)
#define BACK_IN_THREAD(kept) enter(kept, &scheduler_stack, &scheduler_bytes)
/* run_thread, which never returned, left marks there. */
#define FORGET_FRAME(top) ASAN_UNPOISON_MEMORY_REGION(static_cast<char *>(top) - 4096, 4096)
#else
#define LEAVE_TO_THREAD(thread) (void)0
#define BACK_IN_SCHEDULER() (void)0
#define LEAVE_TO_SCHEDULER(kept) (void)0
#define BACK_IN_THREAD(kept) (void)0
#define FORGET_FRAME(top) (void)0
#endif

static void resume(struct thread &thread) {
    self = &thread;
    threadIdx = thread.index;
    LEAVE_TO_THREAD(thread);
    emulation_switch(&scheduler, thread.stack_pointer);
    BACK_IN_SCHEDULER();
}

/* Until what the thread waits for has come. */
static void suspend(enum state state, const char *what, const place &here) {
    struct thread &thread = *self;
    thread.state = state;
    thread.what = what;
    thread.where = here;
    LEAVE_TO_SCHEDULER(&thread.asan_stack);
    emulation_switch(&thread.stack_pointer, scheduler);
    BACK_IN_THREAD(thread.asan_stack);
}

static void run_thread() {
    BACK_IN_THREAD(nullptr);
    launch->kernel->call(launch->params);
    self->state = ENDED;
    live--;
    LEAVE_TO_SCHEDULER(nullptr);
    void *never;
    emulation_switch(&never, scheduler);
}

static void *map(size_t bytes) {
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    return memory;
}

static void open_thread(unsigned i) {
    struct thread &thread = threads[i];
    if (!thread.stack) {
        char *memory = static_cast<char *>(map(GUARD_BYTES + STACK_BYTES));
        (void)mprotect(memory, GUARD_BYTES, PROT_NONE);
        thread.stack = memory + GUARD_BYTES;
    }
    /* What emulation_switch takes: six registers and where it returns to, as if called from there. */
    char *end = static_cast<char *>(thread.stack) + STACK_BYTES;
    FORGET_FRAME(end);
    void **top = reinterpret_cast<void **>(end) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void *>(run_thread);
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    thread.stack_pointer = top;
    thread.state = READY;
    thread.index = {i, 0, 0};
    thread.copies.clear();
    thread.groups.clear();
}

/* --- threads that meet --- */

static struct warp &own_warp() { return warps[threadIdx.x / warp_lanes]; }
struct exchange &warp_exchange() {
    return own_warp().exchange;
}
unsigned lane() { return threadIdx.x % warp_lanes; }

static bool same_text(const char *a, const char *b) { return a == b || strcmp(a, b) == 0; }
static bool same_place(const place &a, const place &b) { return a.line == b.line && same_text(a.file, b.file); }

bool warp_meet(const char *what, const place &here) {
    struct warp &warp = own_warp();
    if (warp.arrived == 0) {
        warp.what = what;
        warp.where = here;
    } else if (!same_text(warp.what, what) || !same_place(warp.where, here)) {
        fault(here, "%s meets other lanes' %s at %s:%d", what, warp.what, warp.where.file, warp.where.line);
    }
    if (++warp.arrived == warp_lanes)
        return true;
    suspend(IN_WARP, what, here);
    return false;
}

void warp_met() {
    struct thread *lanes = self - lane();
    own_warp().arrived = 0;
    for (unsigned i = 0; i < warp_lanes; i++)
        lanes[i].state = READY;
}

static void release_block() {
    waiting = 0;
    for (unsigned i = 0; i < thread_count; i++)
        if (threads[i].state == IN_BLOCK)
            threads[i].state = READY;
}

void block_meet(const place &here) {
    for (unsigned i = 0; waiting > 0 && i < thread_count; i++)
        if (threads[i].state == IN_BLOCK) {
            if (!same_place(threads[i].where, here))
                fault(here, "__syncthreads meets thread %u's at %s:%d", i, threads[i].where.file,
                      threads[i].where.line);
            break;
        }
    waiting++;
    suspend(IN_BLOCK, "__syncthreads", here);
}

/* --- memory --- */

uint8_t *shared_memory() { return shared; }

uint8_t *shared_at(uint32_t address, size_t bytes, size_t alignment, const place &here) {
    if (address < FIRST_SHARED_ADDRESS || address - FIRST_SHARED_ADDRESS + bytes > launch->shared_bytes)
        fault(here, "%zu bytes at %d of %zu of shared memory", bytes, static_cast<int>(address - FIRST_SHARED_ADDRESS),
              launch->shared_bytes);
    if (address % alignment != 0)
        fault(here, "%zu bytes at %u of shared memory: not aligned to %zu", bytes, address - FIRST_SHARED_ADDRESS,
              alignment);
    return shared + (address - FIRST_SHARED_ADDRESS);
}

uint32_t shared_offset(const void *pointer, const place &here) {
    size_t offset = static_cast<size_t>(static_cast<const uint8_t *>(pointer) - shared);
    if (offset > launch->shared_bytes)
        fault(here, "%p is not in shared memory", pointer);
    return FIRST_SHARED_ADDRESS + static_cast<uint32_t>(offset);
}

void check_global(const void *address, size_t bytes, size_t alignment, const place &here) {
    static uintptr_t known[256]; /* pages of the system that were found */
    uintptr_t first = reinterpret_cast<uintptr_t>(address);
    if (first % alignment != 0)
        fault(here, "%zu bytes at %p: not aligned to %zu", bytes, address, alignment);
    for (uintptr_t page = first >> 12; page <= (first + bytes - 1) >> 12; page++) {
        if (known[page % 256] == page)
            continue;
        const uint8_t *there = reinterpret_cast<const uint8_t *>(std::max(first, page << 12));
        if (!launch->is_known(there))
            fault(here, "%zu bytes at %p: not memory of the device", bytes, address);
        known[page % 256] = page;
    }
}

/* As much as the launch asked for, and a page behind it that faults. */
static void open_shared() {
    static uint8_t *memory;
    if (!memory) {
        memory = static_cast<uint8_t *>(map(MOST_SHARED_BYTES + GUARD_BYTES));
        (void)mprotect(memory + MOST_SHARED_BYTES, GUARD_BYTES, PROT_NONE);
    }
    shared = memory + MOST_SHARED_BYTES - (launch->shared_bytes + 127) / 128 * 128;
    memset(shared, POISON, static_cast<size_t>(memory + MOST_SHARED_BYTES - shared));
}

/* --- asynchronous copies --- */

static void begin_copy(const copy &copy, const place &here) {
    check_global(copy.from, copy.bytes, 16, here);
    memset(copy.to, POISON, copy.bytes);
}

void copy_later(uint32_t to, const void *from, const place &here) {
    self->copies.push_back({shared_at(to, 16, 16, here), from, 16, 0});
    begin_copy(self->copies.back(), here);
}

void copies_close() {
    size_t closed = std::accumulate(self->groups.begin(), self->groups.end(), static_cast<size_t>(0));
    self->groups.push_back(self->copies.size() - closed);
}

static void finish(size_t copies) {
    for (size_t i = 0; i < copies; i++)
        memcpy(self->copies[i].to, self->copies[i].from, self->copies[i].bytes);
    self->copies.erase(self->copies.begin(), self->copies.begin() + static_cast<ptrdiff_t>(copies));
}

void copies_finish(size_t pending) {
    while (self->groups.size() > pending) {
        finish(self->groups.front());
        self->groups.erase(self->groups.begin());
    }
}

void copies_finish_all() {
    finish(self->copies.size());
    self->groups.clear();
}

/* What a barrier's 8 bytes hold here. */
struct copy_barrier {
    int32_t bytes;           /* to come in this phase */
    uint16_t magic;          /* of one that was opened */
    uint8_t phase, arrivals; /* number of the phase; arrivals to come in it */
};
#define COPY_BARRIER 0xBA44

static copy_barrier *barrier_at(uint32_t address, const place &here) {
    copy_barrier *barrier = reinterpret_cast<copy_barrier *>(shared_at(address, sizeof(*barrier), 8, here));
    if (barrier->magic != COPY_BARRIER)
        fault(here, "no barrier at %u of shared memory", address - FIRST_SHARED_ADDRESS);
    return barrier;
}

static void end_phase(copy_barrier *barrier) {
    if (barrier->arrivals == 0 && barrier->bytes == 0) {
        barrier->phase++;
        barrier->arrivals = 1;
    }
}

void copy_barrier_open(uint32_t address, const place &here) {
    copy_barrier barrier = {0, COPY_BARRIER, 0, 1};
    memcpy(shared_at(address, sizeof(barrier), 8, here), &barrier, sizeof(barrier));
}

void copy_barrier_expect(uint32_t address, uint32_t bytes, const place &here) {
    copy_barrier *barrier = barrier_at(address, here);
    if (barrier->arrivals == 0)
        fault(here, "a second arrival in one phase of the barrier at %u", address - FIRST_SHARED_ADDRESS);
    barrier->arrivals--;
    barrier->bytes += static_cast<int32_t>(bytes);
    end_phase(barrier);
}

void copy_bulk_later(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, const place &here) {
    if (bytes == 0 || bytes % 16 != 0)
        fault(here, "a bulk copy of %u bytes", bytes);
    (void)barrier_at(barrier, here);
    bulk_copies.push_back({shared_at(to, bytes, 16, here), from, bytes, barrier});
    begin_copy(bulk_copies.back(), here);
}

static bool has_passed(uint32_t address, uint32_t parity, const place &here) {
    return barrier_at(address, here)->phase % 2 != parity;
}

/* Those that the phase waits for, which are the barrier's oldest. */
static void finish_bulk(uint32_t address, uint32_t parity, const place &here) {
    for (size_t i = 0; i < bulk_copies.size() && !has_passed(address, parity, here);) {
        copy copy = bulk_copies[i];
        if (copy.barrier != address) {
            i++;
            continue;
        }
        bulk_copies.erase(bulk_copies.begin() + static_cast<ptrdiff_t>(i));
        memcpy(copy.to, copy.from, copy.bytes);
        copy_barrier *barrier = barrier_at(address, here);
        barrier->bytes -= static_cast<int32_t>(copy.bytes);
        end_phase(barrier);
    }
}

void copy_barrier_wait(uint32_t address, uint32_t parity, const place &here) {
    finish_bulk(address, parity, here);
    if (has_passed(address, parity, here))
        return;
    self->barrier = address;
    self->parity = parity;
    suspend(AT_COPY, "a copy", here);
}

/* --- blocks --- */

static std::vector<unsigned> shuffled(unsigned count) {
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), source);
    return order;
}

static bool is_ready(struct thread &thread) {
    if (thread.state == AT_COPY) {
        finish_bulk(thread.barrier, thread.parity, thread.where);
        if (has_passed(thread.barrier, thread.parity, thread.where))
            thread.state = READY;
    }
    return thread.state == READY;
}

/* Until all its lanes wait for something that other warps do; false: they did from the start. */
static bool run_warp(unsigned warp, const std::vector<unsigned> &lanes) {
    bool any = false;
    for (bool more = true; more; any |= more) {
        more = false;
        for (unsigned lane : lanes) {
            struct thread &thread = threads[warp * warp_lanes + lane];
            if (is_ready(thread)) {
                resume(thread);
                more = true;
            }
        }
    }
    return any;
}

[[noreturn]] static void report_standstill() {
    fprintf(stderr, "emulated kernel %s, block (%u, %u, %u): no thread can go on\n", launch->kernel->name, blockIdx.x,
            blockIdx.y, blockIdx.z);
    for (unsigned first = 0, next; first < thread_count; first = next) {
        const struct thread &thread = threads[first];
        for (next = first + 1; next < thread_count && threads[next].state == thread.state &&
                               (thread.state == ENDED || same_place(threads[next].where, thread.where));)
            next++;
        fprintf(stderr, "  threads %u to %u: %s", first, next - 1, state_names[thread.state]);
        if (thread.state != ENDED)
            fprintf(stderr, ", %s at %s:%d", thread.what, thread.where.file, thread.where.line);
        fputc('\n', stderr);
    }
    abort();
}

static void run_block() {
    const place nowhere = {"after the last line", 0};
    open_shared();
    for (unsigned i = 0; i < thread_count; i++)
        open_thread(i);
    for (unsigned i = 0; i < warp_count; i++)
        warps[i].arrived = 0;
    live = thread_count;
    waiting = 0;
    const std::vector<unsigned> warp_order = shuffled(warp_count), lane_order = shuffled(warp_lanes);
    while (live > 0) {
        bool any = false;
        for (unsigned warp : warp_order)
            any |= run_warp(warp, lane_order);
        if (waiting > 0 && waiting == live)
            release_block();
        else if (!any)
            report_standstill();
    }
    if (!bulk_copies.empty())
        fault(nowhere, "%zu bulk copies that nobody waited for", bulk_copies.size());
}

static void seed() {
    const char *given = getenv("OSCAR_EMULATION_SEED");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t number = given && *given ? strtoull(given, nullptr, 0) : static_cast<uint64_t>(now.tv_nsec) + 1;
    fprintf(stderr, "OSCAR_EMULATION_SEED=%llu\n", static_cast<unsigned long long>(number));
    source.seed(number);
}

} // namespace emulated

__attribute__((constructor)) static void fill_half_values() {
    for (unsigned bits = 0; bits < 1 << 16; bits++)
        emulated::half_values[bits] = oscar_float_from_half(static_cast<uint16_t>(bits));
}

static struct emulated_module *modules;

void emulation_add(struct emulated_module *module) {
    module->next = modules;
    modules = module;
}

const struct emulated_kernel *emulation_find(const char *name, int architecture, const char *kernel) {
    for (const struct emulated_module *module = modules; module; module = module->next)
        if (strcmp(module->name, name) == 0 && (module->architecture == 0 || module->architecture == architecture))
            for (size_t i = 0; i < module->count; i++)
                if (strcmp(module->kernels[i].name, kernel) == 0)
                    return &module->kernels[i];
    return nullptr;
}

void emulation_run(const struct emulated_launch *to_run) {
    using namespace emulated;
    std::lock_guard<std::mutex> lock(one_launch);
    static std::once_flag seeded;
    std::call_once(seeded, seed);
    launch = to_run;
    gridDim = {to_run->grid[0], to_run->grid[1], to_run->grid[2]};
    blockDim = {to_run->block[0], 1, 1};
    thread_count = blockDim.x;
    warp_count = thread_count / warp_lanes;
    if (thread_count % warp_lanes != 0 || thread_count > MOST_THREADS || to_run->block[1] * to_run->block[2] != 1 ||
        to_run->shared_bytes > MOST_SHARED_BYTES)
        fault({to_run->kernel->name, 0}, "a block of %u threads and %zu bytes is not emulated", thread_count,
              to_run->shared_bytes);
    for (unsigned block : shuffled(gridDim.x * gridDim.y * gridDim.z)) {
        blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
        run_block();
    }
}
