/* SPDX-License-Identifier: Apache-2.0 */
/* oscar-calib hadamard: the built-in default as a file, to start from or to compare with. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "calib/options.h"
#include "calib/progress.h"
#include "calib/sweep.h"
#include "calib/tensor_writer.h"
#include "proto/cleanup.h"
#include "proto/geometry.h"

static int check_shape(const struct calib_options *options, struct oscar_cause *cause) {
    return oscar_geometry_check(&(struct oscar_geometry){.layers = options->hadamard_layers,
                                                         .query_heads = options->kv_heads,
                                                         .kv_heads = options->kv_heads,
                                                         .head_dim = options->hadamard_head_dim,
                                                         .dtype = OSCAR_BF16,
                                                         .page_tokens = OSCAR_PAGE_TOKENS,
                                                         .sink_tokens = OSCAR_SINK_TOKENS,
                                                         .recent_tokens = OSCAR_RECENT_TOKENS},
                                cause);
}

int calib_hadamard(const struct calib_options *options, struct oscar_cause *cause) {
    const uint32_t heads = options->kv_heads;
    _cleanup_(tensor_writer_cleanup) struct tensor_writer *writer = NULL;
    _cleanup_free_ int32_t *ranks = malloc((size_t)2 * heads * sizeof(*ranks));
    int r = check_shape(options, cause);
    if (r == 0 && ranks == NULL)
        r = oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for ranks");
    if (r == 0)
        r = tensor_writer_new(&writer, cause);
    if (r < 0)
        return r;
    tensor_writer_metadata(writer, "oscar.format", "1");
    tensor_writer_metadata(writer, "oscar.model", "%s",
                           options->fit.model != NULL ? options->fit.model : FIT_ANY_MODEL);
    tensor_writer_metadata(writer, "oscar.method", "oscar-calib %s, hadamard, nearest rounding of K, no capture",
                           OSCAR_VERSION_STRING);
    tensor_writer_metadata(writer, "oscar.layers", "%" PRIu32, options->hadamard_layers);
    tensor_writer_metadata(writer, "oscar.kv_heads", "%" PRIu32, heads);
    tensor_writer_metadata(writer, "oscar.head_dim", "%" PRIu32, options->hadamard_head_dim);
    tensor_writer_metadata(writer, "oscar.rotation_k", "hadamard");
    tensor_writer_metadata(writer, "oscar.rotation_v", "hadamard");
    for (uint32_t h = 0; h < heads; h++) {
        ranks[h] = (int32_t)sweep_rank(0.96, options->hadamard_head_dim);
        ranks[heads + h] = (int32_t)sweep_rank(0.92, options->hadamard_head_dim);
    }
    for (uint32_t layer = 0; layer < options->hadamard_layers; layer++)
        for (uint32_t side = 0; side < 2; side++) {
            char name[32];
            (void)snprintf(name, sizeof(name), "layers.%" PRIu32 ".%c.rank", layer, side == 0 ? 'k' : 'v');
            tensor_writer_add(writer, name, OSCAR_TENSOR_I32, 1, (uint64_t[]){heads}, ranks + (size_t)side * heads);
        }
    if ((r = tensor_writer_save(writer, options->output, cause)) < 0)
        return r;
    say("wrote %s", options->output);
    return 0;
}
