/* SPDX-License-Identifier: Apache-2.0 */
/* How the driver is found, which device is taken, and what is said where that cannot be. A driver stays once it is loaded, so the
 * tests of a failing one come first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "tests/support/fake_cuda.h"
#include "tests/support/kernel_fixture.h"

static struct fake_cuda *fake;
static bool on_wsl;

int __real_access(const char *path, int mode);
int __wrap_access(const char *path, int mode);
int __wrap_access(const char *path, int mode) {
    return strcmp(path, "/dev/dxg") == 0 ? (on_wsl ? 0 : -1) : __real_access(path, mode);
}

static int new_machine(void **state) {
    (void)state;
    fake = fake_cuda_reset();
    on_wsl = false;
    return 0;
}

static int open_device(const char *id, struct oscar_device **ret, struct oscar_cause *cause) {
    return oscar_device_cuda()->device_open(&(struct oscar_device_options){.id = id}, ret, cause);
}

/* Opening fails with this error and a cause with these words. */
static void assert_refused(const char *id, int error, const char *first, const char *second) {
    struct oscar_device *device = NULL;
    struct oscar_cause cause = {""};
    assert_int_equal(open_device(id, &device, &cause), error);
    assert_null(device);
    if (!strstr(cause.text, first) || !strstr(cause.text, second))
        fail_msg("\"%s\" has no \"%s\" or no \"%s\"", cause.text, first, second);
    assert_int_equal(atomic_load(&fake->live), 0);
}

static void assert_backend(const char *name, const char *wanted) {
    const struct oscar_device_ops *ops = NULL;
    assert_int_equal(oscar_device_find(name, &ops, NULL), 0);
    assert_string_equal(ops->name, wanted);
}

/* --- without a loaded driver ------------------------------------------------------------------------------------------------ */

static void no_driver_is_a_named_error_and_auto_takes_the_host(void **state) {
    (void)state;
    const struct oscar_device_ops *ops = NULL;
    struct oscar_cause cause = {""};
    setenv("OSCAR_CUDA_DRIVER", "/nowhere/libcuda.so.1", 1);
    assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, "/nowhere/libcuda.so.1", "install it, or use the host backend");
    assert_int_equal(oscar_device_find("cuda", &ops, &cause), OSCAR_ERR_UNSUPPORTED);
    assert_null(ops);
    assert_non_null(strstr(cause.text, "no NVIDIA driver"));
    cause.text[0] = '\0';
    assert_int_equal(oscar_device_find("auto", &ops, &cause), 0);
    assert_ptr_equal(ops, oscar_device_host());
    assert_non_null(strstr(cause.text, "no NVIDIA driver"));
    assert_backend(NULL, "host");
    assert_backend("", "host");
    assert_backend("host", "host");
}

static void a_library_without_its_functions_is_too_old(void **state) {
    (void)state;
    setenv("OSCAR_CUDA_DRIVER", "libm.so.6", 1);
    assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, "too old: it has no cuInit", "CUDA 13.0");
}

static void an_old_driver_is_told_what_it_lacks(void **state) {
    (void)state;
    fake->version = 12040;
    assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, "is for CUDA 12.4", "update it");
}

static void each_way_that_a_driver_does_not_start_has_a_remedy(void **state) {
    (void)state;
    static const struct {
        CUresult result;
        const char *remedy;
    } cases[] = {
        {CUDA_ERROR_NO_DEVICE, "CUDA_VISIBLE_DEVICES"},
        {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "reboot"},
        {CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "take it away"},
        {CUDA_ERROR_SYSTEM_NOT_READY, "start nvidia-fabricmanager"},
        {CUDA_ERROR_STUB_LIBRARY, "take stubs out of the library path"},
        {CUDA_ERROR_MPS_CONNECTION_FAILED, "start nvidia-cuda-mps-control"},
        {CUDA_ERROR_UNKNOWN, "check /dev/nvidia*"},
        {CUDA_ERROR_NOT_PERMITTED, "a text of the fake driver"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        fake->init = cases[i].result;
        assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, "cuInit: CUDA_ERROR_", cases[i].remedy);
        assert_backend("auto", "host");
    }
}

/* --- with it ---------------------------------------------------------------------------------------------------------------- */

static void a_driver_that_comes_later_is_found(void **state) {
    (void)state;
    struct oscar_device *device;
    assert_int_equal(open_device(NULL, &device, NULL), 0);
    oscar_device_cuda()->device_close(device);
    assert_backend("auto", "cuda");
    assert_backend("cuda", "cuda");
    assert_int_equal(atomic_load(&fake->live), 0);
}

static void an_unknown_backend_is_refused(void **state) {
    (void)state;
    const struct oscar_device_ops *ops = NULL;
    struct oscar_cause cause = {""};
    assert_int_equal(oscar_device_find("metal", &ops, &cause), OSCAR_ERR_UNSUPPORTED);
    assert_non_null(strstr(cause.text, "host and cuda"));
}

static void no_visible_device_is_a_named_error(void **state) {
    (void)state;
    fake->devices = 0;
    assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, "no GPU is visible", "CUDA_VISIBLE_DEVICES");
    assert_backend("auto", "host");
}

static const char *second_id = "GPU-b0b1b2b3-b4b5-b6b7-b8b9-babbbcbdbebf";

static void assert_opens(const char *id, const char *name) {
    struct oscar_device *device;
    struct oscar_cause cause = {""};
    const struct oscar_device_ops *ops = oscar_device_cuda();
    if (open_device(id, &device, &cause) < 0)
        fail_msg("%s", cause.text);
    assert_non_null(strstr(ops->device_summary(device), name));
    if (id && *id)
        assert_int_equal(strcasecmp(ops->device_id(device), id), 0);
    ops->device_close(device);
}

static void a_device_is_found_by_its_uuid_wherever_it_stands(void **state) {
    (void)state;
    assert_opens(NULL, "Fake GPU 0");
    assert_opens("", "Fake GPU 0");
    assert_opens(second_id, "Fake GPU 1");
    assert_opens("gpu-B0B1B2B3-B4B5-B6B7-B8B9-BABBBCBDBEBF", "Fake GPU 1");
    fake->visible[0] = 1; /* as CUDA_VISIBLE_DEVICES=1,0 does it */
    fake->visible[1] = 0;
    assert_opens(NULL, "Fake GPU 1");
    assert_opens(second_id, "Fake GPU 1");
    fake->visible[0] = 2;
    assert_refused(second_id, OSCAR_ERR_NOT_FOUND, second_id,
                   "There is: GPU-c0c1c2c3-c4c5-c6c7-c8c9-cacbcccdcecf GPU-a0");
    assert_refused("1", OSCAR_ERR_NOT_FOUND, "no GPU \"1\"", "CUDA_VISIBLE_DEVICES");
}

static void each_lack_of_a_device_is_named_with_a_remedy(void **state) {
    (void)state;
    static const struct {
        CUdevice_attribute attribute;
        int value;
        const char *cause, *remedy;
    } cases[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 7, "compute capability is below 8.0", "Ampere"},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 0, "unified addresses", "64-bit"},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0, "cannot be registered", "update the driver"},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0, "cannot write 64-bit values", "update the driver"},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_PROHIBITED, "compute mode is prohibited", "-c DEFAULT"},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_EXCLUSIVE_PROCESS, "lets one process in", "start MPS"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        new_machine(state);
        fake->devices = 1;
        fake->device[0].attribute[cases[i].attribute] = cases[i].value;
        assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, cases[i].cause, cases[i].remedy);
        assert_backend("auto", "host");
    }
}

static void an_exclusive_device_can_be_shared_under_mps(void **state) {
    (void)state;
    fake->device[0].attribute[CU_DEVICE_ATTRIBUTE_COMPUTE_MODE] = CU_COMPUTEMODE_EXCLUSIVE_PROCESS;
    fake->device[0].attribute[CU_DEVICE_ATTRIBUTE_MPS_ENABLED] = 1;
    assert_opens(NULL, "Fake GPU 0");
}

static void the_default_is_the_first_device_that_can_be_used(void **state) {
    (void)state;
    fake->device[0].attribute[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 7;
    assert_opens(NULL, "Fake GPU 1");
    assert_refused("GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf", OSCAR_ERR_UNSUPPORTED, "Fake GPU 0", "below 8.0");
    fake->device[1].attribute[CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED] = 0;
    assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, "Fake GPU 0", "below 8.0");
}

/* Each call in turn, with an error that leaves no other way. */
static void the_call_that_fails_an_opening_is_named(void **state) {
    struct oscar_device *device;
    assert_int_equal(open_device(second_id, &device, NULL), 0);
    unsigned calls = atomic_load(&fake->calls);
    oscar_device_cuda()->device_close(device);
    for (unsigned call = 1; call <= calls; call++) {
        struct oscar_cause cause = {""};
        new_machine(state);
        fake->fail_at = call;
        fake->failure = CUDA_ERROR_ILLEGAL_ADDRESS;
        assert_true(open_device(second_id, &device, &cause) < 0);
        char name[64]; /* without its version */
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(fake->failed, "_"), fake->failed);
        if (!strstr(cause.text, name) || !strstr(cause.text, "CUDA_ERROR_"))
            fail_msg("call %u, of %s, failed, and was told as \"%s\"", call, name, cause.text);
    }
    new_machine(state);
    fake->failing = "cuEventQuery";
    fake->failure = CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_refused(NULL, OSCAR_ERR_DEVICE, "zeroing a chunk: cuEventQuery", "CUDA_ERROR_");
}

static void a_mig_instance_is_refused_by_name_and_by_what_it_is(void **state) {
    (void)state;
    assert_refused("MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf", OSCAR_ERR_UNSUPPORTED, "MIG", "use a whole GPU");
    fake->devices = 1;
    strcpy(fake->device[0].name, "NVIDIA H100 80GB HBM3 MIG 1g.10gb");
    assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, "MIG 1g.10gb", "use a whole GPU");
}

static void wsl_is_refused(void **state) {
    (void)state;
    on_wsl = true;
    assert_refused(NULL, OSCAR_ERR_UNSUPPORTED, "this is WSL (/dev/dxg)", "use Linux, or the host backend");
    assert_backend("auto", "host");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(no_driver_is_a_named_error_and_auto_takes_the_host, new_machine),
        cmocka_unit_test_setup(a_library_without_its_functions_is_too_old, new_machine),
        cmocka_unit_test_setup(an_old_driver_is_told_what_it_lacks, new_machine),
        cmocka_unit_test_setup(each_way_that_a_driver_does_not_start_has_a_remedy, new_machine),
        cmocka_unit_test_setup(a_driver_that_comes_later_is_found, new_machine),
        cmocka_unit_test_setup(an_unknown_backend_is_refused, new_machine),
        cmocka_unit_test_setup(no_visible_device_is_a_named_error, new_machine),
        cmocka_unit_test_setup(a_device_is_found_by_its_uuid_wherever_it_stands, new_machine),
        cmocka_unit_test_setup(each_lack_of_a_device_is_named_with_a_remedy, new_machine),
        cmocka_unit_test_setup(an_exclusive_device_can_be_shared_under_mps, new_machine),
        cmocka_unit_test_setup(the_default_is_the_first_device_that_can_be_used, new_machine),
        cmocka_unit_test_setup(the_call_that_fails_an_opening_is_named, new_machine),
        cmocka_unit_test_setup(a_mig_instance_is_refused_by_name_and_by_what_it_is, new_machine),
        cmocka_unit_test_setup(wsl_is_refused, new_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
