/* SPDX-License-Identifier: Apache-2.0 */
/* A process's descriptors: how many are open, and how large their table is. */
#ifndef OSCAR_TESTS_SUPPORT_DESCRIPTORS_H
#define OSCAR_TESTS_SUPPORT_DESCRIPTORS_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

/* Those that are open in another process. */
static inline unsigned descriptors_of(pid_t pid) {
    char path[64];
    unsigned count = 0;
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *directory = opendir(path);
    if (directory == NULL) {
        perror(path);
        abort();
    }
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;)
        count += entry->d_name[0] != '.';
    (void)closedir(directory);
    return count;
}

/* Those that this process has open. */
static inline unsigned open_descriptors(void) { return descriptors_of(getpid()) - 1; /* the directory's */ }

/* Places in the table, which the kernel grows when a number is needed that is not below it. 0: cannot be read. */
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
