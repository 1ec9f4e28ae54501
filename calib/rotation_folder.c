/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/rotation_folder.h"

#include <dirent.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

bool rotation_folder_is(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static int is_file_of_k(const struct dirent *entry) { return fnmatch("k_rotation*.pt", entry->d_name, 0) == 0; }
static int is_file_of_v(const struct dirent *entry) { return fnmatch("v_rotation*.pt", entry->d_name, 0) == 0; }

int rotation_folder_find(const char *folder, char side, char **ret_path, struct oscar_cause *cause) {
    struct dirent **entries = NULL;
    char *path = NULL;
    int r = 0;
    int count = scandir(folder, &entries, side == 'k' ? is_file_of_k : is_file_of_v, alphasort);
    if (count < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot read the folder %.150s: %m", folder);
    if (count == 0)
        r = oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "the folder %.150s holds no %c_rotation*.pt", folder, side);
    else if (count > 1)
        r = oscar_fail(cause, OSCAR_ERR_INVALID,
                       "the folder %.80s holds %.60s and %.60s: name the files of both sides by --k and --v", folder,
                       entries[0]->d_name, entries[1]->d_name);
    else if (asprintf(&path, "%s/%s", folder, entries[0]->d_name) < 0)
        r = oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a name");
    for (int i = 0; i < count; i++)
        free(entries[i]);
    free(entries);
    if (r == 0)
        *ret_path = path;
    return r;
}
