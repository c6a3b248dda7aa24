/* SPDX-License-Identifier: Apache-2.0 */
/* Where the control groups of this process are: the folder of the process's own group
 * in each hierarchy that may limit it, and the way up to the mount point. Version 1 and
 * 2, also both at once. Knows nothing of what the files say. No locks. */
#ifndef CM_BASE_CGROUP_H
#define CM_BASE_CGROUP_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct cm_cgroup {
    bool is_v2;
    size_t mount_length;     /* path begins with the mount point, this long */
    char path[PATH_MAX / 2]; /* without the root */
} cm_cgroup;

/* The groups for `controller` ("memory", "cpu"): the version 2 hierarchy and version
 * 1's of that controller, as far as they are mounted. Answers how many were written. */
int cm_cgroup_find(const char *root, const char *controller, cm_cgroup out[2]);

/* Go to the group's parent. False at the mount point. */
bool cm_cgroup_up(cm_cgroup *group);

/* As cm_text_read and cm_text_load, of the group's file `name`. */
bool cm_cgroup_read(const char *root, const cm_cgroup *group, const char *name,
                    char *out, size_t nbytes);
char *cm_cgroup_load(const char *root, const cm_cgroup *group, const char *name);

#endif
