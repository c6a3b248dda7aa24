/* SPDX-License-Identifier: Apache-2.0 */
/* A folder of files that takes the place of / in C tests. Functions that read /proc or
 * /sys get its path as their root, and find there what the test has written. */
#pragma once

#include <ftw.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

/* The path of such a folder. */
typedef struct fake_root {
    char path[64];
} fake_root;

/* Make an empty folder with a fresh name. */
CM_UNUSED static void
root_make(fake_root *root)
{
    snprintf(root->path, sizeof(root->path), "/tmp/cumem-test-XXXXXX");
    if (mkdtemp(root->path) == NULL) {
        perror(root->path);
        exit(2);
    }
}

/* Write `text` to the file `path` below the root, and make the folders that it needs.
 * `path` begins with a slash. */
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

/* Remove the folder with everything in it. */
CM_UNUSED static void
root_remove(const fake_root *root)
{
    (void)nftw(root->path, root_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}
