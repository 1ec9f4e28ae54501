/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/rotation.h"

#include <cblas.h>
#include <lapacke.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"

#define NEGLIGIBLE 1e-10

void rotation_hadamard(uint32_t d, double *ret) {
    double unit = 1.0 / sqrt(d);
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            ret[(size_t)i * d + j] = __builtin_parity(i & j) != 0 ? -unit : unit;
}

/* Falling eigenvalues and, where `vectors` is set, eigenvectors in the rows of `matrix`; else the matrix is used up. */
static int decompose(double *matrix, uint32_t d, char vectors, double *eigenvalues, struct oscar_cause *cause) {
    /* Symmetric, so rows or columns are the same on the way in; on the way out column-major columns are our rows. */
    lapack_int info = LAPACKE_dsyev(LAPACK_COL_MAJOR, vectors, 'L', (lapack_int)d, matrix, (lapack_int)d, eigenvalues);
    if (info != 0)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "a covariance has no eigenvalues (LAPACK dsyev: %d)",
                          (int)info);
    for (uint32_t i = 0; i < d / 2; i++) {
        double swapped = eigenvalues[i];
        eigenvalues[i] = eigenvalues[d - 1 - i];
        eigenvalues[d - 1 - i] = swapped;
        if (vectors == 'V')
            cblas_dswap((int)d, matrix + (size_t)i * d, 1, matrix + (size_t)(d - 1 - i) * d, 1);
    }
    return 0;
}

int rotation_eigenvalues(const double *target, uint32_t d, double *ret, struct oscar_cause *cause) {
    _cleanup_free_ double *matrix = malloc((size_t)d * d * sizeof(*matrix));
    if (matrix == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a covariance");
    memcpy(matrix, target, (size_t)d * d * sizeof(*matrix));
    return decompose(matrix, d, 'N', ret, cause);
}

uint32_t rotation_rank(const double *eigenvalues, uint32_t d) {
    uint32_t rank = 0;
    while (rank < d && eigenvalues[rank] > NEGLIGIBLE * eigenvalues[0])
        rank++;
    return rank;
}

static uint32_t reversed_bits(uint32_t value, uint32_t count) {
    uint32_t result = 0;
    for (uint32_t bit = 1; bit < count; bit <<= 1, value >>= 1)
        result = result << 1 | (value & 1);
    return result;
}

int rotation_from_target(const double *target, uint32_t d, float *ret, double *ret_eigenvalues,
                         struct oscar_cause *cause) {
    const size_t size = (size_t)d * d;
    _cleanup_free_ double *memory = malloc(3 * size * sizeof(*memory));
    if (memory == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a rotation");
    double *vectors = memory; /* Uᵀ */
    double *hadamard = memory + size;
    double *product = memory + 2 * size;
    memcpy(vectors, target, size * sizeof(*vectors));
    int r = decompose(vectors, d, 'V', ret_eigenvalues, cause);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < d; i++) { /* an eigenvector's sign is anybody's choice: LAPACK's must not show */
        double *vector = vectors + (size_t)i * d;
        if (vector[cblas_idamax((int)d, vector, 1)] < 0)
            cblas_dscal((int)d, -1.0, vector, 1);
    }
    rotation_hadamard(d, hadamard);
    cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)d, (int)d, (int)d, 1.0, vectors, (int)d, hadamard, (int)d,
                0.0, product, (int)d);
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            ret[(size_t)i * d + j] = (float)product[(size_t)i * d + reversed_bits(j, d)];
    return 0;
}
