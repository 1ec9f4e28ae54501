/* SPDX-License-Identifier: Apache-2.0 */
/* Built once a level: the level's table. */
#include "kernels/host/level_code.h"

#include "kernels/host/level_functions.h"

const struct host_level_code HOST_NAME(host_code) = {
    .rotate = HOST_NAME(level_rotate),
    .store = HOST_NAME(level_store),
    .inspect = HOST_NAME(level_inspect),
    .pack_scratch_bytes = HOST_NAME(level_pack_scratch_bytes),
    .pack_begin = HOST_NAME(level_pack_begin),
    .pack = HOST_NAME(level_pack),
};
