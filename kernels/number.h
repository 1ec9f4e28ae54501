/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels' names for the conversions of proto/half.h: round to nearest even, subnormals kept, NaN stays NaN. */
#ifndef OSCAR_KERNELS_NUMBER_H
#define OSCAR_KERNELS_NUMBER_H

#include "proto/half.h"

static inline float oscar_float_from_bits(uint32_t bits) { return oscar_bits_float(bits); }
static inline float oscar_bf16_to_float(uint16_t bits) { return oscar_float_from_bfloat(bits); }
static inline uint16_t oscar_bf16_from_float(float value) { return oscar_bfloat_from_float(value); }
static inline float oscar_fp16_to_float(uint16_t bits) { return oscar_float_from_half(bits); }
static inline uint16_t oscar_fp16_from_float(float value) { return oscar_half_from_float(value); }

#endif
