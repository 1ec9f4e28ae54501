/* SPDX-License-Identifier: Apache-2.0 */
/* Version of the wire protocol. Same major: the lower minor is spoken. Another major is refused in words. */
#ifndef OSCAR_PROTO_VERSION_H
#define OSCAR_PROTO_VERSION_H

#include <stdint.h>

#define OSCAR_PROTOCOL_MAJOR 1U
#define OSCAR_PROTOCOL_MINOR 0U

/* Feature bits: both sides use the intersection. None is optional in 1.0. */
#define OSCAR_FEATURES UINT64_C(0)

#endif
