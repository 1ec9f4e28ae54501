/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of a geometry and the sizes that follow from it. All products are formed in 64 bits. */
#ifndef OSCAR_PROTO_GEOMETRY_H
#define OSCAR_PROTO_GEOMETRY_H

#include <stddef.h>
#include <stdint.h>

#include "oscar/geometry.h"

#include "proto/cause.h"

#define OSCAR_MAX_LAYERS 512U
#define OSCAR_MAX_KV_HEADS 256U
#define OSCAR_MAX_GROUP 64U                      /* query heads a KV head */
#define OSCAR_MAX_PAGE_BYTES (UINT64_C(1) << 31) /* of one dense page */

/* OSCAR_ERR_GEOMETRY with the field and its bound in `cause` when any dimension is out of range. */
int oscar_geometry_check(const struct oscar_geometry *geometry, struct oscar_cause *cause);

/* Bytes of one page of the given geometry (checked before): all layers and KV heads. */
uint64_t oscar_dense_page_bytes(const struct oscar_geometry *geometry);
uint64_t oscar_packed_page_bytes(const struct oscar_geometry *geometry);

#endif
