/* SPDX-License-Identifier: Apache-2.0 */
#include "base/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int
open_file(const char *root, const char *path)
{
    char *whole;
    if (root == NULL) {
        return open(path, O_RDONLY | O_CLOEXEC);
    }
    if (asprintf(&whole, "%s%s", root, path) < 0) {
        return -1;
    }
    int file = open(whole, O_RDONLY | O_CLOEXEC);
    free(whole);
    return file;
}

/* As much as fits, ended by a zero. -1 when it cannot be read. */
static ssize_t
read_file(int file, char *out, size_t nbytes)
{
    size_t filled = 0;
    ssize_t got = 1;
    while (got > 0 && filled < nbytes - 1) {
        do {
            got = read(file, out + filled, nbytes - 1 - filled);
        } while (got < 0 && errno == EINTR);
        filled += got > 0 ? (size_t)got : 0;
    }
    out[got < 0 ? 0 : filled] = '\0';
    return got < 0 ? -1 : (ssize_t)filled;
}

bool
cm_text_read(const char *root, const char *path, char *out, size_t nbytes)
{
    out[0] = '\0';
    int file = open_file(root, path);
    if (file < 0) {
        return false;
    }
    ssize_t got = read_file(file, out, nbytes);
    (void)close(file);
    return got >= 0;
}

char *
cm_text_load(const char *root, const char *path)
{
    enum { ROOM = 64 << 10 }; /* more than any of them has */
    int file = open_file(root, path);
    char *text = file < 0 ? NULL : malloc(ROOM);
    if (text != NULL && read_file(file, text, ROOM) < 0) {
        free(text);
        text = NULL;
    }
    if (file >= 0) {
        (void)close(file);
    }
    return text;
}

static bool
is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Read digits at *text and step over them. */
static bool
take_number(const char **text, uint64_t *out)
{
    const char *at = *text;
    uint64_t value = 0;
    if (!is_digit(*at)) {
        return false;
    }
    for (; is_digit(*at); at++) {
        if (__builtin_mul_overflow(value, 10u, &value)
            || __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value)) {
            return false;
        }
    }
    *text = at;
    *out = value;
    return true;
}

bool
cm_text_parse_u64(const char *text, uint64_t *out)
{
    uint64_t value;
    if (!take_number(&text, &value) || strchr(" \t\n", *text) == NULL) {
        return false; /* strchr finds the end of the text, too */
    }
    *out = value;
    return true;
}

bool
cm_text_find_u64(const char *text, const char *key, uint64_t *out)
{
    size_t length = strlen(key);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n' ? 1 : 0;
        if (strncmp(line, key, length) == 0 && strchr(" \t", line[length]) != NULL
            && line[length] != '\0') {
            return cm_text_parse_u64(line + length + strspn(line + length, " \t"), out);
        }
    }
    return false;
}

void
cm_text_visit_list(const char *text,
                   void (*visit)(void *context, uint64_t first, uint64_t last),
                   void *context)
{
    uint64_t first;
    while (take_number(&text, &first)) {
        uint64_t last = first;
        if (*text == '-') {
            text++;
            if (!take_number(&text, &last) || last < first) {
                return;
            }
        }
        visit(context, first, last);
        if (*text != ',') {
            return;
        }
        text++;
    }
}
