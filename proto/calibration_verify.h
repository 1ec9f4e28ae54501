/* SPDX-License-Identifier: Apache-2.0 */
/* The costly half of a calibration's checks: every number in it. */
#ifndef OSCAR_PROTO_CALIBRATION_VERIFY_H
#define OSCAR_PROTO_CALIBRATION_VERIFY_H

#include "proto/calibration.h"
#include "proto/cause.h"

/* OSCAR_ERR_CALIBRATION naming the tensor, the head and the number that is wrong. */
int oscar_calibration_verify(const struct oscar_calibration *calibration, struct oscar_cause *cause);

#endif
