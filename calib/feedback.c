/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/feedback.h"

#include <cblas.h>
#include <lapacke.h>
#include <stdlib.h>

#include "proto/cleanup.h"

int feedback_factor(const double *covariance, const double *rotation, uint32_t d, double lambda, float *ret,
                    struct oscar_cause *cause) {
    const size_t size = (size_t)d * d;
    _cleanup_free_ double *memory = malloc(2 * size * sizeof(*memory));
    if (memory == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a feedback factor");
    double *metric = memory;
    double *half = memory + size;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)d, (int)d, (int)d, 1.0, covariance, (int)d, rotation,
                (int)d, 0.0, half, (int)d);
    cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)d, (int)d, (int)d, 1.0, rotation, (int)d, half, (int)d,
                0.0, metric, (int)d);
    double trace = 0;
    for (uint32_t i = 0; i < d; i++)
        trace += metric[i * (d + 1)];
    for (uint32_t i = 0; i < d; i++)
        metric[i * (d + 1)] = trace > 0 ? metric[i * (d + 1)] + lambda * trace / d : 1.0;
    /* Column-major and upper is row-major and lower: M = G Gᵀ, and L is G with its columns scaled to a diagonal of 1. */
    lapack_int info = LAPACKE_dpotrf(LAPACK_COL_MAJOR, 'U', (lapack_int)d, metric, (lapack_int)d);
    if (info != 0)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                          "the queries' covariance is singular: its leading minor of order %d is not positive",
                          (int)info);
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            ret[(size_t)i * d + j] =
                i == j ? 1.0F : (j < i ? (float)(metric[(size_t)i * d + j] / metric[j * (d + 1)]) : 0.0F);
    return 0;
}
