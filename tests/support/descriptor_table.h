/* SPDX-License-Identifier: Apache-2.0 */
/* The size of a process's table of descriptors: the kernel grows it when a number is needed that is not below it. */
#ifndef OSCAR_TESTS_SUPPORT_DESCRIPTOR_TABLE_H
#define OSCAR_TESTS_SUPPORT_DESCRIPTOR_TABLE_H

#include <stdio.h>
#include <sys/types.h>

/* 0: cannot be read. */
static inline unsigned descriptor_table_places(pid_t pid) {
    char text[64];
    unsigned places = 0;
    snprintf(text, sizeof(text), "/proc/%d/status", (int)pid);
    FILE *status = fopen(text, "re");
    while (status != NULL && places == 0 && fgets(text, sizeof(text), status) != NULL)
        (void)sscanf(text, "FDSize: %u", &places);
    if (status != NULL)
        (void)fclose(status);
    return places;
}

#endif
