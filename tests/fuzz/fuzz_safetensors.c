/* SPDX-License-Identifier: Apache-2.0 */
/* Any file: what is accepted lies in the file, whatever its header says. */
#include <string.h>

#include "proto/safetensors.h"
#include "proto/text.h"
#include "tests/fuzz/fuzz.h"

static void check_tensor(const struct oscar_tensor_view *view, const uint8_t *bytes, size_t size) {
    FUZZ_REQUIRE(view->dims <= OSCAR_SAFETENSORS_MAX_DIMS);
    uint64_t elements = 1;
    for (uint32_t i = 0; i < view->dims; i++)
        elements *= view->shape[i];
    FUZZ_REQUIRE(elements == view->elements);
    FUZZ_REQUIRE(view->bytes == view->elements * oscar_tensor_type_bytes(view->type));
    FUZZ_REQUIRE(oscar_tensor_type_name(view->type)[0] != '\0');
    if (view->bytes == 0)
        return;
    const uint8_t *data = view->data;
    FUZZ_REQUIRE(data >= bytes + 8 && view->bytes <= (uint64_t)(bytes + size - data));
    fuzz_touch(data);
    fuzz_touch(data + view->bytes - 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    struct oscar_safetensors *file = NULL;
    struct oscar_cause cause = {0};
    int r = oscar_safetensors_parse(bytes, size, &file, &cause);
    if (r < 0) {
        FUZZ_REQUIRE(r == OSCAR_ERR_CORRUPT && file == NULL);
        FUZZ_REQUIRE(cause.text[0] != '\0' && oscar_text_valid(cause.text, strlen(cause.text)));
        return 0;
    }
    const char *name;
    for (size_t i = 0; (name = oscar_safetensors_name(file, i)) != NULL; i++) {
        struct oscar_tensor_view view;
        FUZZ_REQUIRE(oscar_safetensors_find(file, name, &view) == 0);
        check_tensor(&view, bytes, size);
    }
    const char *model = oscar_safetensors_metadata(file, "oscar.model");
    if (model != NULL)
        fuzz_touch(model + strlen(model));
    oscar_safetensors_free(file);
    return 0;
}
