/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/serve/calibration_files.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/cleanup.h"

#define MAX_FILE_BYTES ((off_t)8 << 30)
#define SUFFIX ".safetensors"

/* Memory that nobody can change any more, mapped read-only here. */
struct sealed {
    int fd; /* -1: none */
    const void *memory;
    size_t bytes;
};

/* One calibration's bytes, kept: models point into them, and a worker that comes later gets the same memory. */
struct content {
    struct content *next;
    struct oscar_digest digest;
    struct sealed file, turns;
    bool turns_made;
    struct oscar_geometry *verified; /* geometries for which the rotations have been checked */
    size_t verified_count;
};

/* A file whose digest is known as long as it looks the same from outside. */
struct known_file {
    struct known_file *next;
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec modified, changed;
    struct oscar_digest digest;
};

struct calibration_files {
    char *directory;
    uint32_t max_pages;
    struct content *contents;
    struct known_file *known;
};

static void close_directory(DIR **directory) {
    if (*directory != NULL)
        (void)closedir(*directory);
}

static void sealed_free(struct sealed *sealed) {
    if (sealed->fd < 0)
        return;
    (void)munmap((void *)(uintptr_t)sealed->memory, sealed->bytes);
    close(sealed->fd);
}

static int new_memory(const char *name, int *ret_fd, struct oscar_cause *cause) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "memfd_create: %m");
    *ret_fd = fd;
    return 0;
}

/* Takes `fd`. */
static int seal(int fd, size_t bytes, struct sealed *ret, struct oscar_cause *cause) {
    _cleanup_close_ int owned = fd;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) < 0)
        return oscar_fail(cause, OSCAR_ERR_INTERNAL, "cannot seal a calibration: %m");
    const void *memory = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "cannot map a calibration of %zu bytes: %m", bytes);
    *ret = (struct sealed){TAKE_FD(owned), memory, bytes};
    return 0;
}

static int write_all(int fd, const uint8_t *bytes, size_t size) {
    while (size > 0) {
        ssize_t written = write(fd, bytes, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return -1;
        bytes += written;
        size -= (size_t)written;
    }
    return 0;
}

static int copy_file(int from, int to, size_t *ret_bytes) {
    _cleanup_free_ uint8_t *buffer = malloc((size_t)1 << 20);
    if (buffer == NULL)
        return -1;
    size_t total = 0;
    for (;;) {
        ssize_t length = read(from, buffer, (size_t)1 << 20);
        if (length < 0 && errno == EINTR)
            continue;
        if (length < 0 || write_all(to, buffer, (size_t)length) < 0)
            return -1;
        if (length == 0)
            break;
        total += (size_t)length;
        if (total > (size_t)MAX_FILE_BYTES) {
            errno = EFBIG;
            return -1;
        }
    }
    *ret_bytes = total;
    return 0;
}

static struct content *find_content(const struct calibration_files *files, const struct oscar_digest *digest) {
    for (struct content *content = files->contents; content != NULL; content = content->next)
        if (memcmp(&content->digest, digest, sizeof(*digest)) == 0)
            return content;
    return NULL;
}

/* Reads a file into sealed memory. What is known by its digest already is not kept twice. */
static int read_content(struct calibration_files *files, int file, const char *name, struct content **ret,
                        struct oscar_cause *cause) {
    _cleanup_close_ int memory = -1;
    int r = new_memory("oscard-calibration", &memory, cause);
    if (r < 0)
        return r;
    size_t bytes;
    if (copy_file(file, memory, &bytes) < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "calibration %.80s cannot be read: %m", name);
    if (bytes == 0)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "calibration %.80s is an empty file", name);
    struct sealed sealed;
    r = seal(TAKE_FD(memory), bytes, &sealed, cause);
    if (r < 0)
        return r;
    struct oscar_digest digest;
    oscar_content_digest(sealed.memory, bytes, &digest);
    struct content *content = find_content(files, &digest);
    if (content != NULL) {
        sealed_free(&sealed);
        *ret = content;
        return 0;
    }
    content = calloc(1, sizeof(*content));
    if (content == NULL) {
        sealed_free(&sealed);
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for calibration %.80s", name);
    }
    content->digest = digest;
    content->file = sealed;
    content->turns.fd = -1;
    content->next = files->contents;
    files->contents = content;
    *ret = content;
    return 0;
}

static void content_free(struct content *content) {
    sealed_free(&content->file);
    sealed_free(&content->turns);
    free(content->verified);
    free(content);
}

static bool same_time(const struct timespec *a, const struct timespec *b) {
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

static struct known_file *find_known(const struct calibration_files *files, const struct stat *status) {
    for (struct known_file *known = files->known; known != NULL; known = known->next)
        if (known->device == status->st_dev && known->inode == status->st_ino && known->size == status->st_size &&
            same_time(&known->modified, &status->st_mtim) && same_time(&known->changed, &status->st_ctim))
            return known;
    return NULL;
}

static void remember(struct calibration_files *files, const struct stat *status, const struct oscar_digest *digest) {
    struct known_file **at = &files->known;
    while (*at != NULL && ((*at)->device != status->st_dev || (*at)->inode != status->st_ino))
        at = &(*at)->next;
    struct known_file *known = *at;
    if (known == NULL) {
        known = calloc(1, sizeof(*known));
        if (known == NULL)
            return; /* it will be read again, no more */
        *at = known;
    }
    known->device = status->st_dev;
    known->inode = status->st_ino;
    known->size = status->st_size;
    known->modified = status->st_mtim;
    known->changed = status->st_ctim;
    known->digest = *digest;
}

/* The content of an open file of the directory. `only`: only if it has this digest, else *ret is NULL. */
static int file_content(struct calibration_files *files, int file, const char *name, const struct oscar_digest *only,
                        struct content **ret, bool *ret_read, struct oscar_cause *cause) {
    struct stat status;
    if (fstat(file, &status) < 0 || !S_ISREG(status.st_mode))
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "calibration %.80s is not a regular file", name);
    const struct known_file *known = find_known(files, &status);
    struct content *content = known != NULL ? find_content(files, &known->digest) : NULL;
    bool wanted = known == NULL || only == NULL || memcmp(&known->digest, only, sizeof(*only)) == 0;
    if (!wanted || content != NULL) {
        *ret = wanted ? content : NULL;
        return 0;
    }
    int r = read_content(files, file, name, &content, cause);
    if (r < 0)
        return r;
    remember(files, &status, &content->digest);
    if (only != NULL && memcmp(&content->digest, only, sizeof(*only)) != 0) {
        /* Only looked at for its digest: nobody uses it yet, unless it was known before. */
        if (content == files->contents && content->verified_count == 0) {
            files->contents = content->next;
            content_free(content);
        }
        content = NULL;
    }
    *ret_read = content != NULL;
    *ret = content;
    return 0;
}

static int open_in(int directory, const char *name) {
    return openat(directory, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
}

static int find_by_name(struct calibration_files *files, const char *name, struct content **ret, bool *ret_read,
                        struct oscar_cause *cause) {
    _cleanup_close_ int directory = open(files->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0)
        return oscar_fail(cause, OSCAR_ERR_NOT_FOUND,
                          "calibration %.60s: directory %.100s: %m: set [calibration] directory", name,
                          files->directory);
    _cleanup_close_ int file = open_in(directory, name);
    if (file < 0 && errno == ENOENT) {
        char longer[OSCAR_NAME_BYTES + sizeof(SUFFIX)];
        snprintf(longer, sizeof(longer), "%s" SUFFIX, name);
        file = open_in(directory, longer);
    }
    if (file < 0)
        return oscar_fail(cause, errno == ENOENT ? OSCAR_ERR_NOT_FOUND : OSCAR_ERR_IO,
                          "calibration %.60s in %.100s: %m", name, files->directory);
    return file_content(files, file, name, NULL, ret, ret_read, cause);
}

static bool parse_hex(const char *text, struct oscar_digest *ret) {
    if (strlen(text) != 2 * (size_t)OSCAR_DIGEST_BYTES)
        return false;
    for (size_t i = 0; i < OSCAR_DIGEST_BYTES; i++) {
        char pair[3] = {text[2 * i], text[2 * i + 1], 0};
        if (!isxdigit((unsigned char)pair[0]) || !isxdigit((unsigned char)pair[1]))
            return false;
        ret->bytes[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    return true;
}

static int find_by_digest(struct calibration_files *files, const char *name, const struct oscar_digest *digest,
                          struct content **ret, bool *ret_read, struct oscar_cause *cause) {
    struct content *content = find_content(files, digest);
    _cleanup_(close_directory) DIR *directory = content == NULL ? opendir(files->directory) : NULL;
    while (content == NULL && directory != NULL) {
        const struct dirent *entry = readdir(directory);
        if (entry == NULL)
            break;
        if (entry->d_name[0] == '.')
            continue;
        _cleanup_close_ int file = open_in(dirfd(directory), entry->d_name);
        if (file >= 0)
            (void)file_content(files, file, entry->d_name, digest, &content, ret_read,
                               NULL); /* a bad file is not the wanted one */
    }
    if (content == NULL)
        return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "no calibration with digest %s in %.100s", name,
                          files->directory);
    *ret = content;
    return 0;
}

static int make_turns(struct calibration_files *files, struct content *content,
                      const struct oscar_calibration *calibration, struct oscar_cause *cause) {
    size_t bytes = oscar_turns_bytes(calibration, files->max_pages);
    if (bytes > 0) {
        _cleanup_close_ int fd = -1;
        int r = new_memory("oscard-turns", &fd, cause);
        if (r < 0)
            return r;
        if (ftruncate(fd, (off_t)bytes) < 0)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for turn tables of %zu bytes: %m", bytes);
        void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory == MAP_FAILED)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "cannot map turn tables of %zu bytes: %m", bytes);
        oscar_turns_fill(calibration, files->max_pages, memory);
        (void)munmap(memory, bytes); /* F_SEAL_WRITE wants no writable mapping */
        r = seal(TAKE_FD(fd), bytes, &content->turns, cause);
        if (r < 0)
            return r;
    }
    content->turns_made = true;
    return 0;
}

static bool is_verified(const struct content *content, const struct oscar_geometry *geometry) {
    for (size_t i = 0; i < content->verified_count; i++)
        if (memcmp(&content->verified[i], geometry, sizeof(*geometry)) == 0)
            return true;
    return false;
}

static void add_verified(struct content *content, const struct oscar_geometry *geometry) {
    struct oscar_geometry *grown = realloc(content->verified, (content->verified_count + 1) * sizeof(*grown));
    if (grown == NULL)
        return; /* it will be verified again, no more */
    content->verified = grown;
    grown[content->verified_count++] = *geometry;
}

static int parse(struct calibration_files *files, struct content *content, const struct oscar_geometry *geometry,
                 struct calibrations_result *ret, struct oscar_cause *cause) {
    bool verified = is_verified(content, geometry);
    int r = oscar_calibration_parse(content->file.memory, content->file.bytes, geometry, !verified, &ret->calibration,
                                    cause);
    if (r < 0)
        return r;
    if (!verified)
        add_verified(content, geometry);
    if (!content->turns_made) {
        r = make_turns(files, content, ret->calibration, cause);
        if (r < 0)
            return r;
    }
    if (content->turns.fd >= 0) {
        r = oscar_calibration_attach_turns(ret->calibration, content->turns.memory, content->turns.bytes,
                                           files->max_pages);
        if (r < 0)
            return oscar_fail(cause, r, "turn tables of %zu bytes do not fit their calibration", content->turns.bytes);
        ret->turns_fd = fcntl(content->turns.fd, F_DUPFD_CLOEXEC, 3);
    }
    ret->file_fd = fcntl(content->file.fd, F_DUPFD_CLOEXEC, 3);
    if (ret->file_fd < 0 || (content->turns.fd >= 0 && ret->turns_fd < 0))
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "out of descriptors: raise LimitNOFILE=");
    return 0;
}

int calibration_files_load(struct calibration_files *files, const char *name, const struct oscar_geometry *geometry,
                           struct calibrations_result *ret, struct oscar_cause *cause) {
    if (name[0] == '\0' || strcmp(name, "default") == 0)
        return oscar_calibration_default(geometry, &ret->calibration, cause);
    struct content *content = NULL;
    struct oscar_digest digest;
    int r = parse_hex(name, &digest) ? find_by_digest(files, name, &digest, &content, &ret->read, cause)
                                     : find_by_name(files, name, &content, &ret->read, cause);
    if (r == 0)
        r = parse(files, content, geometry, ret, cause);
    if (r < 0)
        calibrations_result_free(ret);
    return r;
}

int calibration_files_new(const char *directory, uint32_t max_pages, struct calibration_files **ret,
                          struct oscar_cause *cause) {
    struct calibration_files *files = calloc(1, sizeof(*files));
    if (files != NULL)
        files->directory = strdup(directory);
    if (files == NULL || files->directory == NULL) {
        free(files);
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for calibrations");
    }
    files->max_pages = max_pages;
    *ret = files;
    return 0;
}

void calibration_files_free(struct calibration_files *files) {
    for (struct content *content = files->contents, *next; content != NULL; content = next) {
        next = content->next;
        content_free(content);
    }
    for (struct known_file *known = files->known, *next; known != NULL; known = next) {
        next = known->next;
        free(known);
    }
    free(files->directory);
    free(files);
}
