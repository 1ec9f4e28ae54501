/* SPDX-License-Identifier: Apache-2.0 */
/* Calibration files: what is read, and everything that is refused by name. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/calibration.h"
#include "proto/geometry.h"
#include "proto_random.h"
#include "proto_tensor_file.h"
#include "proto_test.h"

#define LAYERS 2
#define HEADS 2
#define DIM 64
#define PAIRS 3
#define FREQUENCIES 32

static const struct oscar_geometry geometry = {
    .layers = LAYERS,
    .query_heads = 4,
    .kv_heads = HEADS,
    .head_dim = DIM,
    .dtype = OSCAR_BF16,
    .page_tokens = OSCAR_PAGE_TOKENS,
    .sink_tokens = OSCAR_SINK_TOKENS,
    .recent_tokens = OSCAR_RECENT_TOKENS,
};

static struct oscar_cause cause;
static struct tensor_file file;

/* Sylvester's Hadamard matrix is as orthogonal as any other; the head's index flips a sign, so that heads differ. */
static void fill_rotation(float *rotation, uint32_t matrices) {
    for (uint32_t n = 0; n < matrices; n++) {
        for (uint32_t i = 0; i < DIM; i++) {
            for (uint32_t j = 0; j < DIM; j++) {
                float sign = __builtin_parity(i & j) != 0 ? -1.0F : 1.0F;
                rotation[(n * DIM + i) * DIM + j] = (i == n ? -sign : sign) / 8.0F;
            }
        }
    }
}

static void add_metadata(const char *kind) {
    tensor_file_metadata(&file, "oscar.format", "1");
    tensor_file_metadata(&file, "oscar.model", "test");
    tensor_file_metadata(&file, "oscar.method", "none");
    tensor_file_metadata(&file, "oscar.layers", "2");
    tensor_file_metadata(&file, "oscar.kv_heads", "2");
    tensor_file_metadata(&file, "oscar.head_dim", "64");
    tensor_file_metadata(&file, "oscar.rotation_k", kind);
    tensor_file_metadata(&file, "oscar.rotation_v", kind);
    tensor_file_metadata(&file, "date", "of no meaning");
}

/* A whole file of kind matrix: layer 0 with a turning centre and feedback, layer 1 with a plain centre and shared rotations. */
static void whole_file(void) {
    tensor_file_clear(&file);
    add_metadata("matrix");
    double *omega = tensor_file_add(&file, "rope.omega", OSCAR_TENSOR_F64, 1, (uint64_t[]){FREQUENCIES});
    for (uint32_t i = 0; i < FREQUENCIES; i++)
        omega[i] = pow(10000.0, -(double)i / FREQUENCIES);
    fill_rotation(tensor_file_add(&file, "layers.0.k.rotation", OSCAR_TENSOR_F32, 3, (uint64_t[]){HEADS, DIM, DIM}),
                  HEADS);
    fill_rotation(tensor_file_add(&file, "layers.0.v.rotation", OSCAR_TENSOR_F32, 3, (uint64_t[]){HEADS, DIM, DIM}),
                  HEADS);
    fill_rotation(tensor_file_add(&file, "layers.1.k.rotation", OSCAR_TENSOR_F32, 3, (uint64_t[]){1, DIM, DIM}), 1);
    fill_rotation(tensor_file_add(&file, "layers.1.v.rotation", OSCAR_TENSOR_F32, 3, (uint64_t[]){1, DIM, DIM}), 1);
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int side = 0; side < 2; side++) {
            char name[32];
            (void)snprintf(name, sizeof(name), "layers.%d.%c.rank", layer, side == 0 ? 'k' : 'v');
            int32_t *rank = tensor_file_add(&file, name, OSCAR_TENSOR_I32, 1, (uint64_t[]){HEADS});
            rank[0] = 10 * layer + side;
            rank[1] = DIM - 1 - rank[0];
        }
        char name[40];
        (void)snprintf(name, sizeof(name), "layers.%d.k.centre.static", layer);
        float *centre = tensor_file_add(&file, name, OSCAR_TENSOR_F32, 2, (uint64_t[]){HEADS, DIM});
        for (uint32_t i = 0; i < HEADS * DIM; i++)
            centre[i] = (float)i;
    }
    float *cosine =
        tensor_file_add(&file, "layers.0.k.centre.cos", OSCAR_TENSOR_F32, 3, (uint64_t[]){HEADS, PAIRS, DIM});
    float *sine = tensor_file_add(&file, "layers.0.k.centre.sin", OSCAR_TENSOR_F32, 3, (uint64_t[]){HEADS, PAIRS, DIM});
    int32_t *pair = tensor_file_add(&file, "layers.0.k.centre.pair", OSCAR_TENSOR_I32, 2, (uint64_t[]){HEADS, PAIRS});
    for (uint32_t i = 0; i < HEADS * PAIRS * DIM; i++) {
        cosine[i] = (float)i / 3.0F;
        sine[i] = -(float)i / 5.0F;
    }
    for (int32_t i = 0; i < HEADS * PAIRS; i++)
        pair[i] = 31 - 5 * i;
    float *feedback = tensor_file_add(&file, "layers.0.k.feedback", OSCAR_TENSOR_F32, 3, (uint64_t[]){HEADS, DIM, DIM});
    for (uint32_t i = 0; i < HEADS * DIM; i++) {
        for (uint32_t j = 0; j <= i % DIM; j++)
            feedback[i * DIM + j] = j == i % DIM ? 1.0F : 0.01F * (float)(i - j);
    }
}

static int parse(int verify, struct oscar_calibration **ret, uint8_t **ret_bytes) {
    size_t size;
    *ret_bytes = tensor_file_write(&file, &size);
    *ret = NULL;
    cause.text[0] = '\0';
    return oscar_calibration_parse(*ret_bytes, size, &geometry, verify, ret, &cause);
}

static void assert_refused(int verify, const char *reason) {
    struct oscar_calibration *calibration;
    uint8_t *bytes;
    int r = parse(verify, &calibration, &bytes);
    if (r != OSCAR_ERR_CALIBRATION || calibration != NULL || strstr(cause.text, reason) == NULL)
        fail_msg("%s: %d, \"%s\"", reason, r, cause.text);
    free(bytes);
}

static void assert_accepted(int verify) {
    struct oscar_calibration *calibration;
    uint8_t *bytes;
    if (parse(verify, &calibration, &bytes) != OSCAR_OK)
        fail_msg("\"%s\"", cause.text);
    oscar_calibration_free(calibration);
    free(bytes);
}

/* --- what is read --- */

static void a_whole_file_is_read(void **state) {
    (void)state;
    struct oscar_calibration *calibration;
    uint8_t *bytes;
    whole_file();
    assert_int_equal(parse(1, &calibration, &bytes), OSCAR_OK);
    assert_int_equal(calibration->layers, LAYERS);
    assert_int_equal(calibration->kv_heads, HEADS);
    assert_int_equal(calibration->head_dim, DIM);
    assert_int_equal(calibration->rotation_k, OSCAR_ROTATION_MATRIX);
    assert_int_equal(calibration->frequencies, FREQUENCIES);
    assert_memory_equal(calibration->omega, tensor_file_data(&file, "rope.omega"), FREQUENCIES * sizeof(double));
    for (uint32_t i = 0; i < HEADS; i++) {
        const struct oscar_head_calibration *head = oscar_calibration_head(calibration, 0, i);
        assert_memory_equal(head->rotation_k, (float *)tensor_file_data(&file, "layers.0.k.rotation") + i * DIM * DIM,
                            DIM * DIM * 4);
        assert_memory_equal(head->rotation_v, (float *)tensor_file_data(&file, "layers.0.v.rotation") + i * DIM * DIM,
                            DIM * DIM * 4);
        assert_memory_equal(head->feedback, (float *)tensor_file_data(&file, "layers.0.k.feedback") + i * DIM * DIM,
                            DIM * DIM * 4);
        assert_memory_equal(head->centre_static, (float *)tensor_file_data(&file, "layers.0.k.centre.static") + i * DIM,
                            DIM * 4);
        assert_memory_equal(head->centre_cos,
                            (float *)tensor_file_data(&file, "layers.0.k.centre.cos") + i * PAIRS * DIM,
                            PAIRS * DIM * 4);
        assert_memory_equal(head->centre_sin,
                            (float *)tensor_file_data(&file, "layers.0.k.centre.sin") + i * PAIRS * DIM,
                            PAIRS * DIM * 4);
        assert_int_equal(head->pairs, PAIRS);
        assert_int_equal(head->centre_pair[2], 31 - 5 * (int)(i * PAIRS + 2));
        const struct oscar_head_calibration *plain = oscar_calibration_head(calibration, 1, i);
        assert_int_equal(plain->pairs, 0);
        assert_null(plain->feedback);
        assert_null(plain->centre_cos);
        assert_non_null(plain->centre_static);
        assert_ptr_equal(plain->rotation_k, oscar_calibration_head(calibration, 1, 0)->rotation_k); /* shared */
        assert_int_equal(plain->rank_k, i == 0 ? 10 : DIM - 11);
        assert_int_equal(plain->rank_v, i == 0 ? 11 : DIM - 12);
    }
    oscar_calibration_free(calibration);
    free(bytes);
}

static void a_hadamard_file_needs_only_ranks(void **state) {
    (void)state;
    struct oscar_calibration *calibration;
    uint8_t *bytes;
    whole_file();
    static const char *const unneeded[] = {"rope.omega",
                                           "layers.0.k.rotation",
                                           "layers.0.v.rotation",
                                           "layers.1.k.rotation",
                                           "layers.1.v.rotation",
                                           "layers.0.k.centre.static",
                                           "layers.1.k.centre.static",
                                           "layers.0.k.centre.cos",
                                           "layers.0.k.centre.sin",
                                           "layers.0.k.centre.pair",
                                           "layers.0.k.feedback"};
    for (size_t i = 0; i < sizeof(unneeded) / sizeof(unneeded[0]); i++)
        tensor_file_drop(&file, unneeded[i]);
    tensor_file_metadata(&file, "oscar.rotation_k", "hadamard");
    tensor_file_metadata(&file, "oscar.rotation_v", "hadamard");
    assert_int_equal(parse(1, &calibration, &bytes), OSCAR_OK);
    const struct oscar_head_calibration *head = oscar_calibration_head(calibration, 1, 1);
    assert_null(head->rotation_k);
    assert_null(head->rotation_v);
    assert_null(head->centre_static);
    assert_int_equal(calibration->frequencies, 0);
    assert_int_equal(oscar_turns_bytes(calibration, 100), 0);
    assert_int_equal(oscar_calibration_attach_turns(calibration, NULL, 0, 100), OSCAR_OK);
    oscar_calibration_free(calibration);
    free(bytes);
}

static void the_digest_is_that_of_the_bytes(void **state) {
    (void)state;
    struct oscar_calibration *calibration;
    struct oscar_digest digest, before;
    uint8_t *bytes;
    size_t size;
    whole_file();
    assert_int_equal(parse(0, &calibration, &bytes), OSCAR_OK);
    free(tensor_file_write(&file, &size));
    oscar_content_digest(bytes, size, &digest);
    assert_memory_equal(&calibration->digest, &digest, sizeof(digest));
    before = calibration->digest;
    oscar_calibration_free(calibration);
    free(bytes);
    ((float *)tensor_file_data(&file, "layers.0.k.feedback"))[DIM] += 0.5F;
    assert_int_equal(parse(0, &calibration, &bytes), OSCAR_OK);
    assert_memory_not_equal(&calibration->digest, &before, sizeof(digest));
    oscar_calibration_free(calibration);
    free(bytes);
}

static void the_default_is_hadamard_without_a_centre(void **state) {
    (void)state;
    static const uint32_t dims[3] = {64, 128, 256}, ranks_k[3] = {61, 122, 245}, ranks_v[3] = {58, 117, 235};
    for (int i = 0; i < 3; i++) {
        struct oscar_geometry shape = geometry;
        struct oscar_calibration *calibration = NULL;
        struct oscar_digest digest;
        shape.head_dim = dims[i];
        assert_int_equal(oscar_calibration_default(&shape, &calibration, &cause), OSCAR_OK);
        assert_int_equal(calibration->rotation_k, OSCAR_ROTATION_HADAMARD);
        assert_int_equal(calibration->rotation_v, OSCAR_ROTATION_HADAMARD);
        assert_null(calibration->file);
        oscar_content_digest(OSCAR_DEFAULT_CALIBRATION_TEXT, strlen(OSCAR_DEFAULT_CALIBRATION_TEXT), &digest);
        assert_memory_equal(&calibration->digest, &digest, sizeof(digest));
        for (uint32_t head = 0; head < LAYERS * HEADS; head++) {
            assert_int_equal(calibration->heads[head].rank_k, ranks_k[i]);
            assert_int_equal(calibration->heads[head].rank_v, ranks_v[i]);
            assert_null(calibration->heads[head].rotation_k);
            assert_null(calibration->heads[head].centre_static);
            assert_null(calibration->heads[head].feedback);
            assert_int_equal(calibration->heads[head].pairs, 0);
        }
        assert_int_equal(oscar_turns_bytes(calibration, 1000), 0);
        oscar_calibration_free(calibration);
    }
    struct oscar_geometry bad = geometry;
    struct oscar_calibration *calibration = NULL;
    bad.head_dim = 96;
    assert_int_equal(oscar_calibration_default(&bad, &calibration, &cause), OSCAR_ERR_GEOMETRY);
    assert_null(calibration);
    oscar_calibration_free(NULL);
}

static void omega_without_pairs_is_left_alone(void **state) {
    (void)state;
    struct oscar_calibration *calibration;
    uint8_t *bytes;
    whole_file();
    tensor_file_drop(&file, "layers.0.k.centre.cos");
    tensor_file_drop(&file, "layers.0.k.centre.sin");
    tensor_file_drop(&file, "layers.0.k.centre.pair");
    assert_int_equal(parse(1, &calibration, &bytes), OSCAR_OK);
    assert_int_equal(calibration->frequencies, 0);
    oscar_calibration_free(calibration);
    free(bytes);
}

static void tensors_of_other_prefixes_are_ignored(void **state) {
    (void)state;
    whole_file();
    (void)tensor_file_add(&file, "eigenvalues.0", OSCAR_TENSOR_F64, 1, (uint64_t[]){3});
    (void)tensor_file_add(&file, "layersx", OSCAR_TENSOR_U8, 1, (uint64_t[]){3});
    assert_accepted(1);
}

/* --- what is refused --- */

static void metadata_is_required_and_checked(void **state) {
    (void)state;
    static const struct {
        const char *key, *value, *reason;
    } wrong[] = {
        {"oscar.format", NULL, "oscar.format is missing"},
        {"oscar.format", "2", "this version reads 1"},
        {"oscar.model", NULL, "oscar.model is missing"},
        {"oscar.model", "", "oscar.model is missing"},
        {"oscar.method", NULL, "oscar.method is missing"},
        {"oscar.layers", NULL, "oscar.layers is missing"},
        {"oscar.layers", "3", "oscar.layers is 3, the model has 2"},
        {"oscar.layers", "02", "oscar.layers is 02"},
        {"oscar.kv_heads", "4", "oscar.kv_heads is 4, the model has 2"},
        {"oscar.head_dim", "128", "oscar.head_dim is 128, the model has 64"},
        {"oscar.rotation_k", NULL, "oscar.rotation_k is missing"},
        {"oscar.rotation_k", "identity", "must be matrix or hadamard"},
        {"oscar.rotation_v", "Matrix", "must be matrix or hadamard"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        whole_file();
        tensor_file_metadata(&file, wrong[i].key, wrong[i].value);
        assert_refused(0, wrong[i].reason);
    }
}

static void missing_tensors_are_named(void **state) {
    (void)state;
    static const struct {
        const char *dropped, *reason;
    } missing[] = {
        {"layers.1.k.rank", "layers.1.k.rank: missing"},
        {"layers.0.v.rank", "layers.0.v.rank: missing"},
        {"layers.1.k.rotation", "layers.1.k.rotation: missing, the metadata says matrix"},
        {"layers.0.v.rotation", "layers.0.v.rotation: missing, the metadata says matrix"},
        {"layers.0.k.centre.static", "layers.0.k.centre.static: missing"},
        {"layers.0.k.centre.cos", "layers.0.k.centre.cos: missing"},
        {"layers.0.k.centre.sin", "layers.0.k.centre.sin: missing"},
        {"layers.0.k.centre.pair", "layers.0.k.centre.pair: missing"},
        {"rope.omega", "layers.0.k.centre.pair: pair 0 of head 0 is 31: must be below the 0 frequencies"},
    };
    for (size_t i = 0; i < sizeof(missing) / sizeof(missing[0]); i++) {
        whole_file();
        tensor_file_drop(&file, missing[i].dropped);
        assert_refused(0, missing[i].reason);
    }
}

static void unexpected_tensors_are_named(void **state) {
    (void)state;
    static const struct {
        const char *name, *reason;
    } unknown[] = {
        {"layers.0.k.rotations", "layers.0.k.rotations: unknown"},
        {"layers.0.v.feedback", "layers.0.v.feedback: unknown"},
        {"layers.0", "layers.0: unknown"},
        {"layers.", "layers.: unknown"},
        {"layers.x.k.rank", "layers.x.k.rank: unknown"},
        {"layers.00.k.rank", "layers.00.k.rank: unknown"},
        {"layers.+1.k.rank", "layers.+1.k.rank: unknown"},
        {"layers. 1.k.rank", "layers. 1.k.rank: unknown"},
        {"layers.-1.k.rank", "layers.-1.k.rank: the model has 2 layers"},
        {"layers.2.k.rank", "layers.2.k.rank: the model has 2 layers"},
        {"layers.4294967296.k.rank", "the model has 2 layers"},
        {"layers.99999999999999999999999.k.rank", "the model has 2 layers"},
        {"rope.theta", "rope.theta: unknown"},
    };
    for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
        whole_file();
        (void)tensor_file_add(&file, unknown[i].name, OSCAR_TENSOR_U8, 1, (uint64_t[]){8});
        assert_refused(0, unknown[i].reason);
    }
    whole_file();
    tensor_file_metadata(&file, "oscar.rotation_v", "hadamard");
    assert_refused(0, "layers.0.v.rotation: not expected, the metadata says hadamard");
}

static void replace(const char *name, enum oscar_tensor_type type, uint32_t dims, const uint64_t *shape) {
    tensor_file_drop(&file, name);
    (void)tensor_file_add(&file, name, type, dims, shape);
}

static void wrong_types_and_shapes_are_named(void **state) {
    (void)state;
    static const struct {
        const char *name;
        enum oscar_tensor_type type;
        uint32_t dims;
        uint64_t shape[4];
        const char *reason;
    } wrong[] = {
        {"layers.0.k.rotation", OSCAR_TENSOR_F64, 3, {2, 64, 64}, "expected F32, found F64"},
        {"layers.0.k.rotation", OSCAR_TENSOR_F32, 2, {64, 64}, "expected shape [2 or 1, 64, 64], found [64, 64]"},
        {"layers.0.k.rotation", OSCAR_TENSOR_F32, 3, {3, 64, 64}, "expected shape [2 or 1, 64, 64], found [3, 64, 64]"},
        {"layers.0.k.rotation", OSCAR_TENSOR_F32, 4, {2, 64, 64, 1}, "found [2, 64, 64, 1]"},
        {"layers.1.v.rotation", OSCAR_TENSOR_F32, 3, {0, 64, 64}, "found [0, 64, 64]"},
        {"layers.0.k.rank", OSCAR_TENSOR_I64, 1, {2}, "expected I32, found I64"},
        {"layers.0.k.rank", OSCAR_TENSOR_I32, 1, {3}, "expected shape [2], found [3]"},
        {"layers.0.k.rank", OSCAR_TENSOR_I32, 0, {0}, "expected shape [2], found []"},
        {"layers.1.k.centre.static", OSCAR_TENSOR_F32, 2, {1, 64}, "expected shape [2, 64], found [1, 64]"},
        {"layers.1.k.centre.static", OSCAR_TENSOR_BF16, 2, {2, 64}, "expected F32, found BF16"},
        {"layers.0.k.centre.cos",
         OSCAR_TENSOR_F32,
         3,
         {2, 17, 64},
         "expected shape [2, 1 to 16, 64], found [2, 17, 64]"},
        {"layers.0.k.centre.cos", OSCAR_TENSOR_F32, 3, {2, 2, 64}, "2 pairs a head, its layer's k.centre.pair has 3"},
        {"layers.0.k.centre.sin", OSCAR_TENSOR_F32, 3, {2, 4, 64}, "4 pairs a head, its layer's k.centre.pair has 3"},
        {"layers.0.k.centre.pair", OSCAR_TENSOR_I32, 2, {2, 0}, "expected shape [2, 1 to 16], found [2, 0]"},
        {"layers.0.k.feedback", OSCAR_TENSOR_F32, 3, {1, 64, 64}, "expected shape [2, 64, 64], found [1, 64, 64]"},
        {"rope.omega", OSCAR_TENSOR_F32, 1, {32}, "expected F64, found F32"},
        {"rope.omega", OSCAR_TENSOR_F64, 1, {33}, "expected shape [1 to 32], found 33"},
        {"rope.omega", OSCAR_TENSOR_F64, 1, {0}, "expected shape [1 to 32], found 0"},
        {"rope.omega", OSCAR_TENSOR_F64, 2, {2, 2}, "in 2 dimensions"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        whole_file();
        replace(wrong[i].name, wrong[i].type, wrong[i].dims, wrong[i].shape);
        assert_refused(0, wrong[i].reason);
        assert_non_null(strstr(cause.text, wrong[i].name));
    }
}

static void data_out_of_alignment_is_refused(void **state) {
    (void)state;
    for (size_t misalign = 1; misalign < 8; misalign++) {
        whole_file();
        file.misalign = misalign;
        assert_refused(0, "not aligned");
    }
    whole_file();
    (void)tensor_file_add(&file, "odd", OSCAR_TENSOR_U8, 1, (uint64_t[]){3});
    (void)tensor_file_add(&file, "layers.1.k.feedback", OSCAR_TENSOR_F32, 3, (uint64_t[]){HEADS, DIM, DIM});
    assert_refused(0, "layers.1.k.feedback: its data is not aligned to 4 bytes");
}

static void ranks_and_pairs_are_checked_without_verify(void **state) {
    (void)state;
    static const int32_t bad_ranks[] = {-1, DIM, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < 4; i++) {
        whole_file();
        ((int32_t *)tensor_file_data(&file, "layers.1.v.rank"))[1] = bad_ranks[i];
        assert_refused(0, "layers.1.v.rank: rank of head 1 is");
        whole_file();
        ((int32_t *)tensor_file_data(&file, "layers.0.k.rank"))[0] = bad_ranks[i];
        assert_refused(0, "must be 0 to 63");
    }
    static const int32_t bad_pairs[] = {-1, FREQUENCIES, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < 4; i++) {
        whole_file();
        ((int32_t *)tensor_file_data(&file, "layers.0.k.centre.pair"))[4] = bad_pairs[i];
        assert_refused(0, "layers.0.k.centre.pair: pair 1 of head 1 is");
    }
    whole_file();
    int32_t *pair = tensor_file_data(&file, "layers.0.k.centre.pair");
    pair[5] = pair[3];
    assert_refused(0, "head 1 has pair 16 twice");
    whole_file();
    pair = tensor_file_data(&file, "layers.0.k.centre.pair");
    pair[3] = pair[0]; /* in another head: fine */
    assert_accepted(1);
}

static void numbers_that_are_not_finite_are_refused(void **state) {
    (void)state;
    static const char *const names[] = {"layers.0.k.rotation",      "layers.1.v.rotation",      "layers.0.k.feedback",
                                        "layers.0.k.centre.static", "layers.1.k.centre.static", "layers.0.k.centre.cos",
                                        "layers.0.k.centre.sin"};
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        for (size_t j = 0; j < 3; j++) {
            whole_file();
            ((float *)tensor_file_data(&file, names[i]))[7] = bad[j];
            assert_refused(1, "element 7 of head 0 is not finite");
            assert_non_null(strstr(cause.text, names[i]));
        }
    }
    const double bad_omega[] = {NAN, INFINITY, -1e-9, 6.3};
    for (size_t j = 0; j < 4; j++) {
        whole_file();
        ((double *)tensor_file_data(&file, "rope.omega"))[5] = bad_omega[j];
        assert_refused(1, "rope.omega: element 5");
    }
}

static void rotations_that_are_not_orthogonal_are_refused(void **state) {
    (void)state;
    whole_file();
    ((float *)tensor_file_data(&file, "layers.0.k.rotation"))[DIM * DIM + 5 * DIM] += 0.001F;
    assert_refused(1, "layers.0.k.rotation: head 1 is not orthogonal: rows 5 and");
    whole_file();
    ((float *)tensor_file_data(&file, "layers.1.v.rotation"))[0] += 0.001F;
    assert_refused(1, "layers.1.v.rotation: head 0 is not orthogonal");
    assert_accepted(0); /* the costly checks are the daemon's */
    whole_file();
    ((float *)tensor_file_data(&file, "layers.0.k.rotation"))[3] += 0.0001F;
    assert_accepted(1); /* within the tolerance */
    whole_file();
    memset(tensor_file_data(&file, "layers.0.v.rotation"), 0, DIM * DIM * 4);
    assert_refused(1, "rows 0 and 0 have the product 0, expected 1");
}

static void feedback_that_is_not_unit_lower_triangular_is_refused(void **state) {
    (void)state;
    whole_file();
    ((float *)tensor_file_data(&file, "layers.0.k.feedback"))[DIM * DIM + 3 * DIM + 4] = 1e-30F;
    assert_refused(1, "layers.0.k.feedback: head 1 is not unit lower triangular: [3][4] is 1e-30, expected 0");
    whole_file();
    ((float *)tensor_file_data(&file, "layers.0.k.feedback"))[3 * DIM + 3] = 1.5F;
    assert_refused(1, "[3][3] is 1.5, expected 1");
}

static void a_centre_that_can_grow_too_large_is_refused(void **state) {
    (void)state;
    whole_file();
    /* |s'| + |a'| + |b'| over all pairs: each alone is within the bound. */
    ((float *)tensor_file_data(&file, "layers.0.k.centre.static"))[9] = 12000.0F;
    ((float *)tensor_file_data(&file, "layers.0.k.centre.cos"))[DIM + 9] = -12000.0F;
    ((float *)tensor_file_data(&file, "layers.0.k.centre.sin"))[2 * DIM + 9] = 12000.0F;
    assert_refused(1, "layers.0.k.centre.*: dim 9 of head 0 can reach 36");
    whole_file();
    ((float *)tensor_file_data(&file, "layers.1.k.centre.static"))[DIM] = -32001.0F;
    assert_refused(1, "layers.1.k.centre.*: dim 0 of head 1 can reach 32001, at most 32000");
    whole_file();
    ((float *)tensor_file_data(&file, "layers.1.k.centre.static"))[DIM] = -32000.0F;
    assert_accepted(1);
}

static void a_damaged_file_is_refused_or_stays_in_bounds(void **state) {
    (void)state;
    /* The header and the integers are what can lead astray: damage hits the header in every round. */
    whole_file();
    size_t size, header = 0;
    uint8_t *good = tensor_file_write(&file, &size);
    for (unsigned i = 0; i < 8; i++)
        header |= (size_t)good[i] << (8 * i);
    for (int round = 0; round < 300; round++) {
        uint8_t *bytes = malloc(size);
        assert_non_null(bytes);
        memcpy(bytes, good, size);
        for (int change = 0; change < 2; change++)
            bytes[8 + random_below((uint32_t)header)] ^= (uint8_t)(1U << random_below(8));
        struct oscar_calibration *calibration = NULL;
        int r = oscar_calibration_parse(bytes, size, &geometry, 1, &calibration, &cause);
        assert_true(r == OSCAR_OK || r == OSCAR_ERR_CALIBRATION || r == OSCAR_ERR_CORRUPT);
        oscar_calibration_free(calibration);
        free(bytes);
    }
    free(good);
}

static int clear(void **state) {
    (void)state;
    tensor_file_clear(&file);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_file_is_read),
        cmocka_unit_test(a_hadamard_file_needs_only_ranks),
        cmocka_unit_test(the_digest_is_that_of_the_bytes),
        cmocka_unit_test(the_default_is_hadamard_without_a_centre),
        cmocka_unit_test(omega_without_pairs_is_left_alone),
        cmocka_unit_test(tensors_of_other_prefixes_are_ignored),
        cmocka_unit_test(metadata_is_required_and_checked),
        cmocka_unit_test(missing_tensors_are_named),
        cmocka_unit_test(unexpected_tensors_are_named),
        cmocka_unit_test(wrong_types_and_shapes_are_named),
        cmocka_unit_test(data_out_of_alignment_is_refused),
        cmocka_unit_test(ranks_and_pairs_are_checked_without_verify),
        cmocka_unit_test(numbers_that_are_not_finite_are_refused),
        cmocka_unit_test(rotations_that_are_not_orthogonal_are_refused),
        cmocka_unit_test(feedback_that_is_not_unit_lower_triangular_is_refused),
        cmocka_unit_test(a_centre_that_can_grow_too_large_is_refused),
        cmocka_unit_test(a_damaged_file_is_refused_or_stays_in_bounds),
    };
    random_seed();
    return cmocka_run_group_tests_name("proto_calibration", tests, NULL, clear);
}
