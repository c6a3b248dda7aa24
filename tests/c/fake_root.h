/* SPDX-License-Identifier: Apache-2.0 */
/* For C tests: a folder of files that takes the place of /proc and /sys. */
#pragma once

#include <ftw.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

typedef struct fake_root {
    char path[64];
} fake_root;

CM_UNUSED static void
root_make(fake_root *root)
{
    snprintf(root->path, sizeof(root->path), "/tmp/cumem-test-XXXXXX");
    if (mkdtemp(root->path) == NULL) {
        perror(root->path);
        exit(2);
    }
}

/* Write `text` to the file `path`, which begins with a slash, making its folders. */
CM_UNUSED static void
root_write(const fake_root *root, const char *path, const char *text)
{
    char whole[PATH_MAX];
    snprintf(whole, sizeof(whole), "%s%s", root->path, path);
    for (char *at = whole + strlen(root->path) + 1; (at = strchr(at, '/')) != NULL;
         at++) {
        *at = '\0';
        (void)mkdir(whole, 0777);
        *at = '/';
    }
    FILE *file = fopen(whole, "w");
    if (file == NULL || fputs(text, file) == EOF || fclose(file) != 0) {
        perror(whole);
        exit(2);
    }
}

static int
root_remove_one(const char *path, const struct stat *about, int type, struct FTW *at)
{
    (void)about;
    (void)type;
    (void)at;
    return remove(path);
}

CM_UNUSED static void
root_remove(const fake_root *root)
{
    (void)nftw(root->path, root_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}
