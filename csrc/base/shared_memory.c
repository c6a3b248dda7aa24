/* SPDX-License-Identifier: Apache-2.0 */
/* Opens memory by its name. This file has the note with its locks, the memfd, and the
 * search for a process that has the memfd. shared_memory.h tells the idea. */
#include "base/shared_memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/list.h"
#include "base/machine.h"
#include "base/thread.h"

enum { PATH_NBYTES = 320, LINK_NBYTES = 80, LOCK_GATE = 0, LOCK_USERS = 1 };

/* The content of a note. It is valid only while the memory has users. A process locks
 * the users only after it has written the note, so a note that was left half written,
 * by a process that was killed, has no users. */
typedef struct note {
    cm_shared_token token;
    uint64_t nbytes;
    int32_t pid; /* a user of the memory, unless it has ended since */
    int32_t fd;  /* the number that the memfd has in that process */
    char form[CM_SHARED_FORM_NBYTES];
} note;

struct cm_shared_memory {
    atomic_uint refs;
    cm_shared_token token;
    char *host; /* mapped, at a huge page */
    uint64_t nbytes;
    uint64_t mapped_nbytes; /* whole pages, at least one */
    int memory_fd;
    int users_fd; /* has the lock of the users; children inherit it */
    char path[PATH_NBYTES];
    char name[CM_SHARED_NAME_NBYTES + 1];
    char form[CM_SHARED_FORM_NBYTES];
};

static cm_status
system_failure(void)
{
    return cm_fail(CM_ESYSTEM, (uint64_t)errno);
}

static void
close_fd(int fd)
{
    if (fd >= 0) {
        (void)close(fd);
    }
}

/* -- locks of the note --------------------------------------------------------------- */

/* Take or release a lock, or ask whether it could be taken. The lock belongs to the
 * open file, and not to the process, so that it also excludes other threads. */
static int
lock_byte(int fd, int command, short type, off_t byte, bool *is_free)
{
    struct flock lock = {
        .l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int result = fcntl(fd, command, &lock);
    if (is_free != NULL) {
        *is_free = result == 0 && lock.l_type == F_UNLCK;
    }
    return result;
}

/* True if any process holds the memory of this note, through another open file. */
static bool
has_users(int fd)
{
    bool is_free = false;
    return lock_byte(fd, F_OFD_GETLK, F_WRLCK, LOCK_USERS, &is_free) == 0 && !is_free;
}

/* A note that a thread of this process has opened for its gate. A child that is forked
 * meanwhile has the open file as well, and so would keep the gate shut for as long as
 * it lives, even after its parent was killed. Therefore the child closes the gates of
 * its parent's threads, which do not exist in the child. */
typedef struct gate_file {
    cm_list node; /* in `gates` */
    int fd;
    /* The memory that the thread is populating, or NULL. That takes long, and a child
     * must not keep memory that may never be finished, so it drops this as well. */
    const cm_shared_memory *unfinished;
} gate_file;

/* The list of all gates. The lock is held while a gate is opened or closed, and by a
 * thread that forks. So no child has a gate that is missing in its list. */
static cm_mutex gates_lock = PTHREAD_MUTEX_INITIALIZER;
static cm_list gates = {.next = &gates, .prev = &gates};
static pthread_once_t gates_once = PTHREAD_ONCE_INIT;

static void
before_fork(void)
{
    cm_mutex_lock(&gates_lock);
}

static void
after_fork_in_parent(void)
{
    cm_mutex_unlock(&gates_lock);
}

static void
after_fork_in_child(void)
{
    cm_list *node;
    while ((node = cm_list_pop_front(&gates)) != NULL) {
        const gate_file *inherited = CM_LIST_ENTRY(node, gate_file, node);
        const cm_shared_memory *memory = inherited->unfinished;
        (void)close(inherited->fd);
        if (memory != NULL) {
            (void)close(memory->memory_fd);
            cm_host_unmap(memory->host, memory->mapped_nbytes);
        }
    }
    cm_mutex_unlock(&gates_lock);
}

static void
watch_forks(void)
{
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static int
open_note(const char *path, int flags)
{
    return open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0600);
}

/* True if the path still leads to the open file, which somebody may have unlinked. */
static bool
is_at(int fd, const char *path)
{
    struct stat here, there;
    return fstat(fd, &here) == 0 && stat(path, &there) == 0
           && here.st_ino == there.st_ino && here.st_dev == there.st_dev;
}

/* Open the note without taking its gate. Returns false with errno set if that fails. */
static bool
open_gate(gate_file *self, const char *path, int flags)
{
    (void)pthread_once(&gates_once, watch_forks);
    cm_mutex_lock(&gates_lock);
    *self = (gate_file){.fd = open_note(path, flags)};
    cm_list_init(&self->node);
    if (self->fd >= 0) {
        cm_list_push_back(&gates, &self->node);
    }
    cm_mutex_unlock(&gates_lock);
    return self->fd >= 0;
}

static void
leave_gate(gate_file *self)
{
    /* A child that has been forked and has not called its handler yet has the open file
     * as well, so closing it would not be enough. */
    (void)lock_byte(self->fd, F_OFD_SETLK, F_UNLCK, LOCK_GATE, NULL);
    cm_mutex_lock(&gates_lock);
    cm_list_remove(&self->node);
    (void)close(self->fd);
    cm_mutex_unlock(&gates_lock);
}

/* Say that the thread populates this memory, or that it no longer does (NULL). */
static void
set_unfinished(gate_file *self, const cm_shared_memory *memory)
{
    cm_mutex_lock(&gates_lock);
    self->unfinished = memory;
    cm_mutex_unlock(&gates_lock);
}

/* Open the note and take its gate. The last user of the memory may have unlinked the
 * note while this function waited. Then the function opens the note that is at the path
 * now.
 * Fails: CM_ESYSTEM; CM_ECANCELLED. */
static cm_status
take_gate(gate_file *self, const char *path, bool creates)
{
    for (;;) {
        if (!open_gate(self, path, creates ? O_CREAT : 0)) {
            return system_failure();
        }
        if (lock_byte(self->fd, F_OFD_SETLKW, F_WRLCK, LOCK_GATE, NULL) != 0) {
            cm_status status =
                errno == EINTR ? cm_fail(CM_ECANCELLED, 0) : system_failure();
            leave_gate(self);
            return status;
        }
        if (is_at(self->fd, path)) {
            return cm_ok();
        }
        leave_gate(self);
    }
}

/* Unlink the note if nobody has the memory. Returns true if the last user may have
 * ended while this was in the gate. That user has then left the note behind. */
static bool
try_to_forget(const char *path)
{
    gate_file self;
    if (!open_gate(&self, path, 0)) {
        return false;
    }
    bool has_gate = lock_byte(self.fd, F_OFD_SETLK, F_WRLCK, LOCK_GATE, NULL) == 0
                    && is_at(self.fd, path);
    bool found_users = has_gate && has_users(self.fd);
    if (has_gate && !found_users) {
        (void)unlink(path);
    }
    /* The users are looked for once more after the gate is free. From then on, a user
     * that ends can take the gate itself. */
    (void)lock_byte(self.fd, F_OFD_SETLK, F_UNLCK, LOCK_GATE, NULL);
    bool is_left_behind = found_users && !has_users(self.fd);
    leave_gate(&self);
    return is_left_behind;
}

/* Unlink the note if nobody has the memory. This does not wait for a process that is in
 * the gate, since that one looks after the note when it leaves. */
static void
forget_note(const char *path)
{
    while (try_to_forget(path)) {
    }
}

/* -- the folder of the notes --------------------------------------------------------- */

/* Find the path of a note, and make its folder. All processes of a user must choose the
 * same folder, so no environment variable decides where it is. Anybody may make a
 * folder in the same place, so one that belongs to somebody else, or that others may
 * write to, is refused. */
static cm_status
find_path(const char *name, char path[PATH_NBYTES])
{
    const char *parent = access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : "/tmp";
    struct stat facts;
    int length =
        snprintf(path, PATH_NBYTES, "%s/cumem-%u", parent, (unsigned)geteuid());
    if (mkdir(path, 0700) != 0 && errno != EEXIST) {
        return system_failure();
    }
    if (lstat(path, &facts) != 0) {
        return system_failure();
    }
    if (!S_ISDIR(facts.st_mode) || facts.st_uid != geteuid()
        || (facts.st_mode & 077) != 0) {
        return cm_fail(CM_ESYSTEM, EPERM);
    }
    (void)snprintf(path + length, (size_t)(PATH_NBYTES - length), "/%s.note", name);
    return cm_ok();
}

/* -- the memfd ------------------------------------------------------------------------ */

/* Write the text that /proc shows for the memfd. */
static void
write_link(cm_shared_token token, char text[LINK_NBYTES])
{
    (void)snprintf(text, LINK_NBYTES, "/memfd:cumem-shared:%016llx%016llx (deleted)",
                   (unsigned long long)token.words[0],
                   (unsigned long long)token.words[1]);
}

static bool
has_link(const char *place, const char *wanted)
{
    char text[LINK_NBYTES];
    ssize_t length = readlink(place, text, sizeof(text));
    return length == (ssize_t)strlen(wanted)
           && memcmp(text, wanted, (size_t)length) == 0;
}

/* Open descriptor `number` of process `pid` if it is the memfd. Returns a descriptor,
 * or the negated errno, which is -ENOENT if it is another file. The link is read before
 * the descriptor is opened, since opening another file, such as a pipe or a terminal,
 * could have effects. It is read again afterwards, since the process may have closed
 * the memfd in between. */
static int
open_of(long pid, long number, const char *wanted)
{
    char place[LINK_NBYTES];
    (void)snprintf(place, sizeof(place), "/proc/%ld/fd/%ld", pid, number);
    if (!has_link(place, wanted)) {
        return -ENOENT;
    }
    int fd = open(place, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
        return -errno;
    }
    (void)snprintf(place, sizeof(place), "/proc/self/fd/%d", fd);
    if (!has_link(place, wanted)) {
        (void)close(fd);
        return -ENOENT;
    }
    return fd;
}

/* True if a search need not go on: it has found a descriptor, or the process lacks what
 * it needs to open anything. */
static bool
is_over(int found)
{
    return found >= 0 || found == -EMFILE || found == -ENFILE || found == -ENOMEM;
}

/* Read the next entry of a folder of /proc whose name is a number. Returns -1 at the
 * end. */
static long
next_number(DIR *folder)
{
    const struct dirent *entry;
    while ((entry = readdir(folder)) != NULL) {
        char *end;
        long number = strtol(entry->d_name, &end, 10);
        if (end != entry->d_name && *end == '\0') {
            return number;
        }
    }
    return -1;
}

/* Look for the memfd among the descriptors of a process. Returns as open_of() does. */
static int
search_process(long pid, const char *wanted)
{
    char place[LINK_NBYTES];
    (void)snprintf(place, sizeof(place), "/proc/%ld/fd", pid);
    DIR *folder = opendir(place);
    if (folder == NULL) { /* most often it has ended, or belongs to somebody else */
        return -errno;
    }
    int fd = -ENOENT;
    for (long number; !is_over(fd) && (number = next_number(folder)) >= 0;) {
        fd = open_of(pid, number, wanted);
    }
    (void)closedir(folder);
    return fd;
}

/* Look for the memfd in all processes. That takes a readlink for each descriptor of
 * each process of the user, which is why the note names a process. */
static int
search_all(const char *wanted)
{
    DIR *folder = opendir("/proc");
    if (folder == NULL) {
        return -errno;
    }
    int fd = -ENOENT;
    for (long pid; !is_over(fd) && (pid = next_number(folder)) >= 0;) {
        fd = search_process(pid, wanted);
    }
    (void)closedir(folder);
    return fd;
}

/* Map the memfd from a huge page on.
 * Fails: CM_ENOMEM; CM_ESYSTEM. */
static cm_status
map_memory(cm_shared_memory *self)
{
    char *start = NULL;
    CM_TRY(cm_host_map_as(self->mapped_nbytes, false, &start));
    void *at = mmap(start, self->mapped_nbytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED, self->memory_fd, 0);
    if (at == MAP_FAILED) {
        cm_status status = system_failure();
        cm_host_unmap(start, self->mapped_nbytes);
        return status;
    }
    (void)madvise(start, self->mapped_nbytes, MADV_HUGEPAGE);
    self->host = start;
    return cm_ok();
}

/* Give each page its memory, on the node that was asked for.
 * Fails: CM_ENOMEM; CM_EINVALID; CM_ENUMA. */
static cm_status
populate_memory(const cm_shared_memory *self, int node)
{
    cm_cpus cpus;
    cm_populate populate = {.start = self->host, .nbytes = self->mapped_nbytes};
    if (node == CM_NUMA_NO_NODE) {
        return cm_populate_run(&populate);
    }
    if (node < 0 || node >= CM_NUMA_MAX_NODES
        || (cm_numa_read_nodes(NULL) >> node & 1) == 0) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)node);
    }
    cm_populate_on_node(&populate, NULL, node, true, &cpus);
    CM_TRY(cm_populate_run(&populate));
    uint64_t elsewhere =
        cm_numa_elsewhere(cm_numa_find_nodes, self->host, self->mapped_nbytes, node);
    return elsewhere == 0 ? cm_ok() : cm_fail(CM_ENUMA, elsewhere);
}

/* Make the memfd, seal its size, and populate it. A process that goes beyond the limit
 * of its control group is killed without an error, so the limit is looked at first. */
static cm_status
make_memory(cm_shared_memory *self, int node, gate_file *gate)
{
    char link[LINK_NBYTES];
    cm_host_memory memory;
    cm_host_memory_read(NULL, &memory);
    if (self->mapped_nbytes > memory.available_nbytes) {
        return cm_fail(CM_EHOSTMEMORY, memory.available_nbytes);
    }
    if (getrandom(&self->token, sizeof(self->token), 0) != sizeof(self->token)) {
        return system_failure();
    }
    write_link(self->token, link);
    *strchr(link, ' ') = '\0'; /* the rest is added by /proc, as "/memfd:" is */
    self->memory_fd =
        memfd_create(link + strlen("/memfd:"), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (self->memory_fd < 0
        || ftruncate(self->memory_fd, (off_t)self->mapped_nbytes) != 0
        || fcntl(self->memory_fd, F_ADD_SEALS,
                 F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
               != 0) {
        return system_failure();
    }
    CM_TRY(map_memory(self));
    set_unfinished(gate, self);
    cm_status status = populate_memory(self, node);
    set_unfinished(gate, NULL);
    return status;
}

/* -- opening ---------------------------------------------------------------------------- */

/* Take the memory of a note from one of its users. *is_new says whether the note has to
 * name another user. */
static cm_status
join_users(cm_shared_memory *self, const note *found, bool *is_new)
{
    char wanted[LINK_NBYTES];
    struct stat facts;
    write_link(found->token, wanted);
    int fd = open_of(found->pid, found->fd, wanted);
    *is_new = fd < 0;
    if (!is_over(fd)) {
        fd = search_all(wanted);
    }
    if (fd < 0) {
        return is_over(fd) ? cm_fail(CM_ESYSTEM, (uint64_t)-fd) : cm_fail(CM_EBUSY, 0);
    }
    if (fstat(fd, &facts) != 0 || (uint64_t)facts.st_size != self->mapped_nbytes) {
        (void)close(fd);
        return cm_fail(CM_EBUSY, 0);
    }
    self->memory_fd = fd;
    self->token = found->token;
    return map_memory(self);
}

static bool
read_note(int fd, note *out)
{
    bool is_whole = pread(fd, out, sizeof(*out), 0) == (ssize_t)sizeof(*out);
    out->form[sizeof(out->form) - 1] = '\0';
    return is_whole;
}

static cm_status
write_note(int fd, const cm_shared_memory *self)
{
    note text = {.token = self->token,
                 .nbytes = self->nbytes,
                 .pid = (int32_t)getpid(),
                 .fd = self->memory_fd};
    memcpy(text.form, self->form, sizeof(text.form));
    ssize_t written = pwrite(fd, &text, sizeof(text), 0);
    if (written < 0) {
        return system_failure();
    }
    return written == (ssize_t)sizeof(text) ? cm_ok() : cm_fail(CM_ESYSTEM, ENOSPC);
}

/* Find or make the memory, and become one of its users. The caller has taken the
 * gate. */
static cm_status
enter(cm_shared_memory *self, const cm_shared_request *request, gate_file *gate,
      char found_form[CM_SHARED_FORM_NBYTES])
{
    note found;
    bool is_new = true;
    const cm_shared_token *token = request->token;
    bool is_there = has_users(gate->fd);
    if (is_there && !read_note(gate->fd, &found)) {
        return cm_fail(CM_EBUSY, 0); /* somebody has cut the note short */
    }
    if (token != NULL
        && (!is_there || memcmp(token, &found.token, sizeof(*token)) != 0)) {
        return cm_fail(CM_ECLOSED, 0);
    }
    if (is_there
        && (found.nbytes != self->nbytes || strcmp(found.form, self->form) != 0)) {
        memcpy(found_form, found.form, sizeof(found.form));
        return cm_fail(CM_ESHAPE, found.nbytes);
    }
    if (is_there) {
        cm_status status = join_users(self, &found, &is_new);
        /* The last user may have ended after it was seen above. Nobody else can have
         * become a user, since that needs the gate. */
        is_there = status.code != CM_EBUSY || has_users(gate->fd);
        is_new = is_new || !is_there;
        if (is_there) {
            CM_TRY(status);
        }
        else if (token != NULL) {
            return cm_fail(CM_ECLOSED, 0);
        }
    }
    if (!is_there) {
        CM_TRY(make_memory(self, request->numa_node, gate));
    }
    if (is_new) {
        CM_TRY(write_note(gate->fd, self));
    }
    self->users_fd = open_note(self->path, 0);
    if (self->users_fd < 0
        || lock_byte(self->users_fd, F_OFD_SETLK, F_RDLCK, LOCK_USERS, NULL) != 0) {
        return system_failure();
    }
    return cm_ok();
}

/* Undo what enter() and find_path() have done so far. */
static void
end_memory(cm_shared_memory *self)
{
    /* This comes first, since whoever finds a user wants to have the memfd from it. */
    close_fd(self->users_fd);
    if (self->host != NULL) {
        cm_host_unmap(self->host, self->mapped_nbytes);
    }
    close_fd(self->memory_fd);
    if (self->path[0] != '\0') {
        forget_note(self->path);
    }
    free(self);
}

cm_status
cm_shared_open(const cm_shared_request *request, char found_form[CM_SHARED_FORM_NBYTES],
               cm_shared_memory **out)
{
    uint64_t mapped_nbytes;
    if (request->name[0] == '\0' || strchr(request->name, '/') != NULL) {
        return cm_fail(CM_EINVALID, 0); /* the name may come from a pickle, which can
                                           hold any text */
    }
    if (!cm_round_up_u64(request->nbytes + (request->nbytes == 0), cm_page_nbytes(),
                         &mapped_nbytes)
        || mapped_nbytes > INT64_MAX || strlen(request->name) > CM_SHARED_NAME_NBYTES
        || strlen(request->form) >= CM_SHARED_FORM_NBYTES) {
        return cm_fail(CM_EOVERFLOW, request->nbytes);
    }
    cm_shared_memory *self = calloc(1, sizeof(*self));
    CM_TRY(cm_allocated(self != NULL, sizeof(*self)));
    gate_file gate;
    atomic_init(&self->refs, 1);
    self->nbytes = request->nbytes;
    self->mapped_nbytes = mapped_nbytes;
    self->memory_fd = self->users_fd = -1;
    memcpy(self->name, request->name, strlen(request->name) + 1);
    memcpy(self->form, request->form, strlen(request->form) + 1);
    cm_status status = find_path(self->name, self->path);
    if (!cm_is_ok(status)) {
        self->path[0] = '\0';
        goto fail;
    }
    status = take_gate(&gate, self->path, request->token == NULL);
    if (status.code == CM_ESYSTEM && status.arg == ENOENT && request->token != NULL) {
        status = cm_fail(CM_ECLOSED, 0);
    }
    if (!cm_is_ok(status)) {
        goto fail;
    }
    status = enter(self, request, &gate, found_form);
    leave_gate(&gate);
    if (!cm_is_ok(status)) {
        goto fail;
    }
    *out = self;
    return status;
fail:
    end_memory(self);
    return status;
}

/* -- users -------------------------------------------------------------------------------- */

cm_shared_memory *
cm_shared_hold(cm_shared_memory *memory)
{
    atomic_fetch_add_explicit(&memory->refs, 1, memory_order_relaxed);
    return memory;
}

void
cm_shared_release(cm_shared_memory *memory)
{
    if (atomic_fetch_sub_explicit(&memory->refs, 1, memory_order_acq_rel) == 1) {
        end_memory(memory);
    }
}

char *
cm_shared_host(const cm_shared_memory *memory)
{
    return memory->host;
}

uint64_t
cm_shared_nbytes(const cm_shared_memory *memory)
{
    return memory->nbytes;
}

const char *
cm_shared_name(const cm_shared_memory *memory)
{
    return memory->name;
}

const char *
cm_shared_form(const cm_shared_memory *memory)
{
    return memory->form;
}

cm_shared_token
cm_shared_token_of(const cm_shared_memory *memory)
{
    return memory->token;
}
