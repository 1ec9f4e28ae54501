/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/fake_cuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/gpu/probe_params.h"

#define EXPORT __attribute__((visibility("default")))

/* Set up by the constructor, so that a program that only names the library finds a whole machine. */
EXPORT struct fake_cuda fake_cuda;

EXPORT void fake_cuda_new_machine(void);

static const struct {
    CUdevice_attribute attribute;
    int value;
} whole[] = {
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 1 << 20},
};

__attribute__((constructor)) void fake_cuda_new_machine(void) {
    int live = atomic_load(&fake_cuda.live); /* the library's own count is no part of the machine */
    memset(&fake_cuda, 0, sizeof(fake_cuda));
    atomic_store(&fake_cuda.live, live);
    fake_cuda.version = CUDA_VERSION;
    fake_cuda.devices = 2;
    for (int i = 0; i < FAKE_DEVICES; i++) {
        struct fake_device *device = &fake_cuda.device[i];
        fake_cuda.visible[i] = i;
        for (int k = 0; k < 16; k++)
            device->uuid[k] = (unsigned char)(0xA0 + 16 * i + k);
        (void)snprintf(device->name, sizeof(device->name), "Fake GPU %d", i);
        for (size_t k = 0; k < sizeof(whole) / sizeof(*whole); k++)
            device->attribute[whole[k].attribute] = whole[k].value;
    }
}

/* --- every call ------------------------------------------------------------------------------------------------------------- */

static _Thread_local unsigned depth;
static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static atomic_uint in_flight; /* commands of all streams */

static CUresult fail(const char *name) {
    while (fake_cuda.failure == CUDA_ERROR_ILLEGAL_ADDRESS && atomic_load(&in_flight) > 0)
        usleep(100); /* nothing runs in a context that is lost */
    fake_cuda.failed = name;
    return fake_cuda.failure;
}

static bool is_to_fail(const char *name) { return fake_cuda.failing && strcmp(fake_cuda.failing, name) == 0; }

static CUresult may_fail(const char *name) {
    unsigned call = atomic_fetch_add(&fake_cuda.calls, 1) + 1;
    return is_to_fail(name) || call == fake_cuda.fail_at ? fail(name) : CUDA_SUCCESS;
}

static CUresult in_context_asking(const char *name) {
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (fake_cuda.sticky != CUDA_SUCCESS)
        return fake_cuda.sticky;
    return is_to_fail(name) ? fail(name) : CUDA_SUCCESS;
}

static CUresult in_context(const char *name) {
    CUresult result = in_context_asking(name);
    return result == CUDA_SUCCESS ? may_fail(name) : result;
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        CUresult tried_ = (call);                                                                                      \
        if (tried_ != CUDA_SUCCESS)                                                                                    \
            return tried_;                                                                                             \
    } while (0)
#define MAY_FAIL() TRY(may_fail(__func__))
#define IN_CONTEXT() TRY(in_context(__func__))
#define IN_CONTEXT_ASKING() TRY(in_context_asking(__func__))

/* What a capture in another thread would be spoiled by. */
static void unsafe_in_capture(void) {
    if (capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        atomic_fetch_add(&fake_cuda.unrelaxed, 1);
}

static void born(void) { atomic_fetch_add(&fake_cuda.live, 1); }
static void gone(void) { atomic_fetch_sub(&fake_cuda.live, 1); }

/* --- driver and devices ----------------------------------------------------------------------------------------------------- */

EXPORT CUresult cuInit(unsigned int flags) {
    MAY_FAIL();
    return flags == 0 ? fake_cuda.init : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    MAY_FAIL();
    *version = fake_cuda.version;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
    static const struct {
        CUresult result;
        const char *name;
    } names[] = {
        {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
    };
    *text = "CUDA_ERROR_OF_SOME_KIND";
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (names[i].result == error)
            *text = names[i].name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    (void)error;
    *text = "a text of the fake driver";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    MAY_FAIL();
    *count = fake_cuda.devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    MAY_FAIL();
    if (ordinal < 0 || ordinal >= fake_cuda.devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = fake_cuda.visible[ordinal];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    MAY_FAIL();
    (void)snprintf(name, (size_t)length, "%s", fake_cuda.device[device].name);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    MAY_FAIL();
    memcpy(uuid->bytes, fake_cuda.device[device].uuid, sizeof(uuid->bytes));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    MAY_FAIL();
    if (attribute >= FAKE_ATTRIBUTES)
        return CUDA_ERROR_INVALID_VALUE;
    *value = fake_cuda.device[device].attribute[attribute];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    (void)device;
    MAY_FAIL();
    *bytes = (size_t)16 << 30;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    MAY_FAIL();
    *context = (CUcontext)&fake_cuda.device[device];
    born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    (void)device;
    gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
    (void)context;
    MAY_FAIL();
    depth++;
    atomic_fetch_add(&fake_cuda.entered, 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *context) {
    (void)context;
    depth--;
    atomic_fetch_sub(&fake_cuda.entered, 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    IN_CONTEXT();
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode old = capture_mode;
    capture_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

/* --- memory ----------------------------------------------------------------------------------------------------------------- */

#define GRANULARITY ((size_t)2 << 20)
#define MEMFD_NAME "fake-cuda"

/* Device memory is a memfd. An allocation or an imported handle is this; a mapping holds no more than the kernel's reference. */
struct memory {
    int fd;
    size_t bytes;
};

/* An address range that is reserved, allocated, registered, or opened from a handle. */
struct region {
    struct region *next;
    void *address;
    size_t bytes;
    struct memory memory; /* fd -1: none of its own */
    unsigned mappings;    /* in a reserved one */
};

static pthread_mutex_t regions_lock = PTHREAD_MUTEX_INITIALIZER;
static struct region *regions;

static CUresult region_add(void *address, size_t bytes, struct memory memory) {
    struct region *region = malloc(sizeof(*region));
    if (!region)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&regions_lock);
    *region = (struct region){.next = regions, .address = address, .bytes = bytes, .memory = memory};
    regions = region;
    pthread_mutex_unlock(&regions_lock);
    born();
    return CUDA_SUCCESS;
}

/* The region that holds the address; NULL: nobody's. */
static struct region *region_of(const void *address) {
    pthread_mutex_lock(&regions_lock);
    struct region *region = regions;
    while (region && ((const char *)address < (char *)region->address ||
                      (const char *)address >= (char *)region->address + region->bytes))
        region = region->next;
    pthread_mutex_unlock(&regions_lock);
    return region;
}

static CUresult region_remove(void *address) {
    pthread_mutex_lock(&regions_lock);
    struct region **at = &regions;
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    struct region *region = *at;
    if (region)
        *at = region->next;
    pthread_mutex_unlock(&regions_lock);
    if (!region)
        return CUDA_ERROR_INVALID_VALUE;
    if (region->memory.fd >= 0)
        close(region->memory.fd);
    free(region);
    gone();
    return CUDA_SUCCESS;
}

/* New memory is full of junk, as it may be on a GPU. */
static CUresult memory_new(size_t bytes, struct memory *ret) {
    int fd = memfd_create(MEMFD_NAME, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const char junk[] = "junk";
    for (size_t at = 0; at < bytes; at += 4096)
        if (pwrite(fd, junk, sizeof(junk), (off_t)at) != (ssize_t)sizeof(junk))
            return CUDA_ERROR_OUT_OF_MEMORY;
    *ret = (struct memory){.fd = fd, .bytes = bytes};
    return CUDA_SUCCESS;
}

static void *map_shared(int fd, size_t bytes) {
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return address == MAP_FAILED ? NULL : address;
}

EXPORT CUresult cuMemGetInfo(size_t *available, size_t *total) {
    IN_CONTEXT();
    *available = (size_t)12 << 30;
    *total = (size_t)16 << 30;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    IN_CONTEXT();
    unsafe_in_capture();
    struct memory memory;
    TRY(memory_new(bytes, &memory));
    *address = (CUdeviceptr)map_shared(memory.fd, bytes);
    return region_add((void *)*address, bytes, memory);
}

EXPORT CUresult cuMemFree(CUdeviceptr address) {
    struct region *region = region_of((void *)address);
    if (!region)
        return CUDA_ERROR_INVALID_VALUE;
    munmap(region->address, region->bytes);
    return region_remove((void *)address);
}

/* pid and descriptor, which the other process opens again. */
struct handle_bytes {
    int pid, fd;
    size_t bytes;
};

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    IN_CONTEXT();
    struct region *region = region_of((void *)address);
    if (!region || region->memory.fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct handle_bytes bytes = {.pid = (int)getpid(), .fd = region->memory.fd, .bytes = region->bytes};
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &bytes, sizeof(bytes));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    unsafe_in_capture();
    struct handle_bytes bytes;
    memcpy(&bytes, &handle, sizeof(bytes));
    if (bytes.pid == (int)getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    char path[64];
    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", bytes.pid, bytes.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    *address = (CUdeviceptr)map_shared(fd, bytes.bytes);
    return region_add((void *)*address, bytes.bytes, (struct memory){.fd = fd, .bytes = bytes.bytes});
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return cuMemFree(address); }

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags option) {
    (void)properties;
    (void)option;
    MAY_FAIL();
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

static CUresult handle_new(struct memory memory, CUmemGenericAllocationHandle *ret) {
    struct memory *held = malloc(sizeof(*held));
    if (!held)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *held = memory;
    *ret = (CUmemGenericAllocationHandle)(uintptr_t)held;
    born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    (void)flags;
    MAY_FAIL();
    unsafe_in_capture();
    if (bytes % GRANULARITY != 0 || properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory memory;
    TRY(memory_new(bytes, &memory));
    return handle_new(memory, handle);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct memory *memory = (struct memory *)(uintptr_t)handle;
    close(memory->fd);
    free(memory);
    gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemExportToShareableHandle(void *ret, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    (void)flags;
    MAY_FAIL();
    int fd = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? dup(((struct memory *)(uintptr_t)handle)->fd) : -1;
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(ret, &fd, sizeof(fd));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                               CUmemAllocationHandleType type) {
    (void)type;
    MAY_FAIL();
    unsafe_in_capture();
    char path[64], target[64] = "";
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", (int)(intptr_t)os_handle);
    struct stat status;
    if (readlink(path, target, sizeof(target) - 1) < 0 || !strstr(target, "memfd:" MEMFD_NAME) ||
        fstat((int)(intptr_t)os_handle, &status) < 0)
        return CUDA_ERROR_UNKNOWN;
    if (fake_cuda.private_imports) {
        int fd = memfd_create(MEMFD_NAME, MFD_CLOEXEC);
        return ftruncate(fd, status.st_size) == 0 ? handle_new((struct memory){fd, (size_t)status.st_size}, handle)
                                                  : CUDA_ERROR_OUT_OF_MEMORY;
    }
    int fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0);
    return handle_new((struct memory){.fd = fd, .bytes = (size_t)status.st_size}, handle);
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
    (void)alignment;
    (void)wanted;
    (void)flags;
    MAY_FAIL();
    void *reserved = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (CUdeviceptr)reserved;
    return region_add(reserved, bytes, (struct memory){.fd = -1});
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    struct region *region = region_of((void *)address);
    if (!region || region->mappings > 0 || region->bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)address, bytes);
    return region_remove((void *)address);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    (void)flags;
    MAY_FAIL();
    unsafe_in_capture();
    const struct memory *memory = (const struct memory *)(uintptr_t)handle;
    struct region *region = region_of((void *)address);
    if (!region || offset != 0 || memory->bytes != bytes)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    region->mappings++;
    born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    MAY_FAIL();
    int protection = PROT_READ | (access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_WRITE : 0);
    return count == 1 && mprotect((void *)address, bytes, protection) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    struct region *region = region_of((void *)address);
    if (!region || region->mappings == 0)
        return CUDA_ERROR_INVALID_VALUE;
    (void)mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    region->mappings--;
    gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    unsafe_in_capture();
    *address = malloc(bytes);
    if (!*address)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*address, 0xFF, bytes);
    return region_add(*address, bytes, (struct memory){.fd = -1});
}

EXPORT CUresult cuMemFreeHost(void *address) {
    TRY(region_remove(address));
    free(address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister(void *address, size_t bytes, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    unsafe_in_capture();
    if (region_of(address))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return region_add(address, bytes, (struct memory){.fd = -1});
}

EXPORT CUresult cuMemHostUnregister(void *address) { return region_remove(address); }

EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *address, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    if (!region_of(address))
        return CUDA_ERROR_INVALID_VALUE;
    *device = (CUdeviceptr)address;
    return CUDA_SUCCESS;
}

/* --- streams ---------------------------------------------------------------------------------------------------------------- */

struct command {
    struct command *next;
    void (*run)(const struct command *command);
    void (*function)(void *);
    void *to;
    const void *from;
    size_t bytes;
    uint64_t value;
};

struct CUstream_st {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct command *first, **last;
    uint64_t enqueued, done;
    bool closing;
};

struct CUevent_st {
    CUstream stream;
    uint64_t after; /* done when the stream has done so many */
};

static void *run_stream(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->closing)
            pthread_cond_wait(&stream->changed, &stream->lock);
        struct command *command = stream->first;
        if (!command)
            break;
        stream->first = command->next;
        if (!stream->first)
            stream->last = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        command->run(command);
        free(command);
        atomic_fetch_sub(&in_flight, 1);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static CUstream stream_new(void) {
    CUstream stream = calloc(1, sizeof(*stream));
    if (!stream)
        return NULL;
    stream->last = &stream->first;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    if (pthread_create(&stream->thread, NULL, run_stream, stream) == 0)
        return stream;
    free(stream);
    return NULL;
}

/* The default stream, which is always there. */
static CUstream legacy;
static void legacy_make(void) { legacy = stream_new(); }
static CUstream actual(CUstream stream) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (stream != NULL && stream != CU_STREAM_LEGACY)
        return stream;
    pthread_once(&once, legacy_make);
    return legacy;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *ret, unsigned int flags, int priority) {
    (void)flags;
    IN_CONTEXT();
    unsafe_in_capture();
    CUstream stream = stream_new();
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake_cuda.priority = priority;
    *ret = stream;
    born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy(CUstream stream) {
    pthread_mutex_lock(&stream->lock);
    stream->closing = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->changed);
    free(stream);
    gone();
    return CUDA_SUCCESS;
}

static CUresult enqueue(CUstream to, struct command command) {
    CUstream stream = actual(to);
    struct command *queued = malloc(sizeof(*queued));
    if (!queued)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *queued = command;
    atomic_fetch_add(&in_flight, 1);
    pthread_mutex_lock(&stream->lock);
    *stream->last = queued;
    stream->last = &queued->next;
    stream->enqueued++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return CUDA_SUCCESS;
}

static bool has_done(CUstream of, uint64_t count) {
    CUstream stream = actual(of);
    pthread_mutex_lock(&stream->lock);
    bool done = stream->done >= count;
    pthread_mutex_unlock(&stream->lock);
    return done;
}

static uint64_t enqueued(CUstream of) {
    CUstream stream = actual(of);
    pthread_mutex_lock(&stream->lock);
    uint64_t count = stream->enqueued;
    pthread_mutex_unlock(&stream->lock);
    return count;
}

EXPORT CUresult cuStreamQuery(CUstream stream) {
    IN_CONTEXT_ASKING();
    if (fake_cuda.capturing)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return has_done(stream, enqueued(stream)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    while (!has_done(stream, enqueued(stream)))
        usleep(100);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    (void)stream;
    *status = fake_cuda.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent *ret, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    *ret = calloc(1, sizeof(**ret));
    if (!*ret)
        return CUDA_ERROR_OUT_OF_MEMORY;
    born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy(CUevent event) {
    free(event);
    gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    IN_CONTEXT();
    if (fake_cuda.capturing)
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    event->stream = stream;
    event->after = enqueued(stream);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent event) {
    IN_CONTEXT_ASKING();
    unsafe_in_capture();
    return has_done(event->stream, event->after) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static void run_copy(const struct command *command) { memmove(command->to, command->from, command->bytes); }
static void run_set(const struct command *command) { memset(command->to, (int)command->value, command->bytes); }
static void run_call(const struct command *command) { command->function(command->to); }
static void run_write(const struct command *command) {
    if (!region_of(command->to)) {
        fake_cuda.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        return;
    }
    __atomic_store_n((uint64_t *)command->to, command->value, __ATOMIC_RELEASE);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    return enqueue(stream,
                   (struct command){.run = run_copy, .to = (void *)to, .from = (const void *)from, .bytes = bytes});
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    return enqueue(stream, (struct command){.run = run_set, .to = (void *)to, .value = value, .bytes = bytes});
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    IN_CONTEXT();
    return enqueue(stream, (struct command){.run = run_call, .function = function, .to = argument});
}

EXPORT CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    if (!region_of((void *)address))
        return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, (struct command){.run = run_write, .to = (void *)address, .value = value});
}

/* --- kernels: images load, and two of tests/gpu/probe.cu run --------------------------------------------------------------------------------------- */

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    IN_CONTEXT();
    unsafe_in_capture();
    *module = (CUmodule)(uintptr_t)image;
    born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
    (void)module;
    gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    (void)module;
    IN_CONTEXT();
    *function = (CUfunction)(uintptr_t)name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    (void)function;
    (void)attribute;
    (void)value;
    IN_CONTEXT();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    (void)attribute;
    (void)function;
    IN_CONTEXT();
    *value = 1024;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                            size_t shared_bytes) {
    (void)function;
    (void)threads;
    (void)shared_bytes;
    IN_CONTEXT();
    *blocks = 2;
    return CUDA_SUCCESS;
}

static void run_hold(const struct command *command) {
    struct probe_gate *gate = command->to;
    __atomic_store_n(&gate->arrived, 1, __ATOMIC_RELEASE);
    for (uint64_t waited = 0; waited < PROBE_LONGEST_NS && !__atomic_load_n(&gate->open, __ATOMIC_ACQUIRE);
         waited += 100000)
        usleep(100);
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z,
                               unsigned int shared_bytes, CUstream stream, void **parameters, void **extra) {
    (void)extra;
    IN_CONTEXT();
    if (grid_x * grid_y * grid_z * block_x * block_y * block_z != 1 || shared_bytes != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    const char *name = (const char *)function;
    void *address;
    memcpy(&address, parameters[0], sizeof(address));
    if (strcmp(name, "probe_hold_kernel") == 0)
        return enqueue(stream, (struct command){.run = run_hold, .to = address});
    if (strcmp(name, "probe_write_kernel") != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    return enqueue(stream,
                   (struct command){.run = run_write, .to = address, .value = *(const uint64_t *)parameters[1]});
}
