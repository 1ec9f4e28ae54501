/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/probe.h"

#include <stdlib.h>
#include <unistd.h>

#include "tests/gpu/probe_params.h"

#ifdef OSCAR_CUDA
#include "kernels/cuda/backend.h"
#endif

#define MAX_WRITES 64

struct probe {
    struct rig *rig;
    struct probe_gate *gate;
    struct write {
        uint64_t *address, value;
    } writes[MAX_WRITES]; /* of the host's functions */
    unsigned count;
#ifdef OSCAR_CUDA
    CUmodule module;
    CUfunction function[2]; /* in the order of `names` */
#endif
};

static void write_now(void *argument) {
    struct write *write = argument;
    *write->address = write->value;
}

static void hold_now(void *argument) {
    struct probe_gate *gate = argument;
    __atomic_store_n(&gate->arrived, 1, __ATOMIC_RELEASE);
    for (uint64_t waited = 0; waited < PROBE_LONGEST_NS && !__atomic_load_n(&gate->open, __ATOMIC_ACQUIRE);
         waited += 100000)
        usleep(100);
}

#ifdef OSCAR_CUDA

extern const unsigned char oscar_cuda_image_probe[];

static void must(CUresult result, const char *what) {
    if (result != CUDA_SUCCESS)
        fail_msg("%s: error %d", what, (int)result);
}

static void open_on_gpu(struct probe *probe) {
    static const char *const names[] = {"probe_write_kernel", "probe_hold_kernel"};
    struct oscar_cause cause = {""};
    void *gate;
    assert_int_equal(cuda_enter(probe->rig->device, NULL), 0);
    if (cuda_image_load(probe->rig->device, oscar_cuda_image_probe, names, 2, &probe->module, probe->function, &cause) <
        0)
        fail_msg("%s", cause.text);
    must(probe->rig->device->driver->cuMemHostAlloc(&gate, sizeof(*probe->gate), CU_MEMHOSTALLOC_DEVICEMAP), "a gate");
    probe->gate = gate;
    cuda_leave(probe->rig->device);
}

static void close_on_gpu(struct probe *probe) {
    const struct cuda_driver *driver = probe->rig->device->driver;
    if (cuda_enter(probe->rig->device, NULL) < 0)
        return;
    (void)driver->cuMemFreeHost(probe->gate); /* under MPS the context may be lost by another process's fault */
    (void)driver->cuModuleUnload(probe->module);
    cuda_leave(probe->rig->device);
}

static void launch(struct probe *probe, struct oscar_stream_impl *stream, CUfunction function, void **parameters) {
    assert_int_equal(cuda_work_begin(stream), 0);
    must(probe->rig->device->driver->cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream->stream, parameters, NULL),
         "launch");
    (void)cuda_work_end(stream, 0);
}

static void write_on_gpu(struct probe *probe, struct oscar_stream_impl *stream, void *address, uint64_t value) {
    launch(probe, stream, probe->function[0], (void *[]){&address, &value});
}

static void hold_on_gpu(struct probe *probe, struct oscar_stream_impl *stream) {
    launch(probe, stream, probe->function[1], (void *[]){&probe->gate});
}

#else

static void open_on_gpu(struct probe *probe) { (void)probe; }
static void close_on_gpu(struct probe *probe) { (void)probe; }
static void write_on_gpu(struct probe *probe, struct oscar_stream_impl *stream, void *address, uint64_t value) {
    (void)probe;
    (void)stream;
    (void)address;
    (void)value;
}
static void hold_on_gpu(struct probe *probe, struct oscar_stream_impl *stream) {
    (void)probe;
    (void)stream;
}

#endif

struct probe *probe_open(struct rig *rig) {
    struct probe *probe = calloc(1, sizeof(*probe));
    assert_non_null(probe);
    probe->rig = rig;
    if (rig_on_gpu())
        open_on_gpu(probe);
    else
        probe->gate = calloc(1, sizeof(*probe->gate));
    assert_non_null(probe->gate);
    return probe;
}

void probe_close(struct probe *probe) {
    if (rig_on_gpu())
        close_on_gpu(probe);
    else
        free(probe->gate);
    free(probe);
}

void probe_write(struct probe *probe, struct oscar_stream_impl *stream, void *address, uint64_t value) {
    if (rig_on_gpu()) {
        write_on_gpu(probe, stream, address, value);
        return;
    }
    assert_true(probe->count < MAX_WRITES);
    struct write *write = &probe->writes[probe->count++];
    *write = (struct write){address, value};
    assert_int_equal(probe->rig->ops->stream_call(stream, write_now, write), 0);
}

void probe_hold(struct probe *probe, struct oscar_stream_impl *stream) {
    probe->gate->open = 0;
    __atomic_store_n(&probe->gate->arrived, 0, __ATOMIC_RELEASE);
    if (rig_on_gpu())
        hold_on_gpu(probe, stream);
    else
        assert_int_equal(probe->rig->ops->stream_call(stream, hold_now, probe->gate), 0);
    while (!__atomic_load_n(&probe->gate->arrived, __ATOMIC_ACQUIRE))
        usleep(50);
}

void probe_release(struct probe *probe) { __atomic_store_n(&probe->gate->open, 1, __ATOMIC_RELEASE); }
