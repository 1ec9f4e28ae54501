/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "oscar/device.h"

int oscar_device_find(const char *name, const struct oscar_device_ops **ret, struct oscar_cause *cause) {
    if (!name || !*name || strcmp(name, "auto") == 0 || strcmp(name, "host") == 0) {
        *ret = oscar_device_host();
        return 0;
    }
    return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "backend \"%.32s\" is not built in: this build has host", name);
}
