/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of base/shared_memory, the memory that processes open by its name. Other users
 * are other processes here, or other objects of this process, since cm_shared_open()
 * treats both alike.
 *
 * This program defines some functions of the C library anew: those with which the
 * memory is made, written down and locked. Each calls the kernel, as the library does.
 * Before that it calls at_step(), by which a test lets the call fail, stops its thread
 * there, or kills its process. Other failures are those of the kernel itself, which
 * limits the descriptors (RLIMIT_NOFILE) and the sizes of files (RLIMIT_FSIZE). */
#include "base/shared_memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/machine.h"
#include "base/thread.h"
#include "check.h"
#include "wait.h"

enum {
    NOTE_NBYTES = 32 + CM_SHARED_FORM_NBYTES,
    NOTE_PID_OFFSET = 24,
    ADVICE_POPULATE = 23, /* MADV_POPULATE_WRITE, which older headers lack */
    ALARM_SECONDS = 100   /* so that no child outlives a test that fails */
};

/* -- steps ----------------------------------------------------------------------------- */

/* The calls at which a test can interfere, in the order in which the first process that
 * opens a name makes them. */
typedef enum step {
    STEP_NONE,
    STEP_READ,      /* users were found, and the note is about to be read */
    STEP_CLOSE,     /* the memfd has been closed */
    STEP_OPENED,    /* a note has been opened, and nobody knows yet for what */
    STEP_GATE,      /* the gate is about to be locked */
    STEP_ASK_USERS, /* the gate is locked, and users are looked for */
    STEP_TOKEN,
    STEP_MEMFD,
    STEP_SIZE, /* the memfd exists, without a size */
    STEP_SEAL,
    STEP_POPULATE,  /* the memory is mapped, and its pages are about to be made */
    STEP_NOTE,      /* the memory is populated, and the note is about to be written */
    STEP_HALF_NOTE, /* half of the note is written */
    STEP_USERS,     /* the note is written, and the users are about to be locked */
    STEP_LEAVE,     /* the memory has a user, and the gate is about to be left */
    STEP_COUNT,
} step;

/* What happens at `at`, once. */
static struct {
    _Atomic int at;
    bool kills;         /* the process is killed */
    int error;          /* the call fails with this errno, unless it is 0 */
    void (*acts)(void); /* this is called first, unless it is NULL */
} plan;

/* Returns true with errno set if the call has to fail. */
static bool
at_step(step now)
{
    int expected = (int)now;
    if (!atomic_compare_exchange_strong(&plan.at, &expected, STEP_NONE)) {
        return false;
    }
    if (plan.kills) {
        (void)kill(getpid(), SIGKILL);
    }
    if (plan.acts != NULL) {
        plan.acts();
    }
    errno = plan.error;
    return plan.error != 0;
}

static void
plan_failure(step at, int error)
{
    plan.kills = false;
    plan.acts = NULL;
    plan.error = error;
    atomic_store(&plan.at, at);
}

static void
plan_kill(step at)
{
    plan.kills = true;
    atomic_store(&plan.at, at);
}

static void
plan_call(step at, void (*acts)(void))
{
    plan.kills = false;
    plan.acts = acts;
    plan.error = 0;
    atomic_store(&plan.at, at);
}

int
fcntl(int fd, int command, ...)
{
    va_list list;
    va_start(list, command);
    /* Callers pass an int or a pointer, and both arrive in a register. */
    void *argument = va_arg(list, void *);
    va_end(list);
    const struct flock *lock = argument;
    bool has_lock = command == F_OFD_SETLK || command == F_OFD_SETLKW;
    bool fails = command == F_ADD_SEALS && at_step(STEP_SEAL);
    fails = fails || (command == F_OFD_GETLK && at_step(STEP_ASK_USERS));
    if (has_lock && lock->l_start == 0 && lock->l_type == F_WRLCK) {
        fails = at_step(STEP_GATE);
    }
    else if (has_lock && lock->l_start == 0) {
        fails = at_step(STEP_LEAVE);
    }
    else if (has_lock) {
        fails = at_step(STEP_USERS);
    }
    return fails ? -1 : (int)syscall(SYS_fcntl, fd, command, argument);
}

int
open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    unsigned mode = (flags & O_CREAT) != 0 ? va_arg(list, unsigned) : 0;
    va_end(list);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    if (fd >= 0 && strstr(path, ".note") != NULL) {
        (void)at_step(STEP_OPENED);
    }
    return fd;
}

int
madvise(void *start, size_t nbytes, int advice)
{
    if (advice == ADVICE_POPULATE) {
        (void)at_step(STEP_POPULATE);
    }
    return (int)syscall(SYS_madvise, start, nbytes, advice);
}

ssize_t
pread(int fd, void *bytes, size_t nbytes, off_t offset)
{
    (void)at_step(STEP_READ);
    return syscall(SYS_pread64, fd, bytes, nbytes, offset);
}

int
close(int fd)
{
    char place[64], link[128] = "";
    (void)snprintf(place, sizeof(place), "/proc/self/fd/%d", fd);
    bool is_memfd = atomic_load(&plan.at) == STEP_CLOSE
                    && readlink(place, link, sizeof(link) - 1) > 0
                    && strstr(link, "cumem-shared") != NULL;
    int result = (int)syscall(SYS_close, fd);
    if (is_memfd) {
        (void)at_step(STEP_CLOSE);
    }
    return result;
}

ssize_t
getrandom(void *buffer, size_t nbytes, unsigned flags)
{
    return at_step(STEP_TOKEN) ? -1 : syscall(SYS_getrandom, buffer, nbytes, flags);
}

int
memfd_create(const char *name, unsigned flags)
{
    return at_step(STEP_MEMFD) ? -1 : (int)syscall(SYS_memfd_create, name, flags);
}

int
ftruncate(int fd, off_t nbytes)
{
    return at_step(STEP_SIZE) ? -1 : (int)syscall(SYS_ftruncate, fd, nbytes);
}

ssize_t
pwrite(int fd, const void *bytes, size_t nbytes, off_t offset)
{
    if (at_step(STEP_NOTE)) {
        return -1;
    }
    ssize_t half = syscall(SYS_pwrite64, fd, bytes, nbytes / 2, offset);
    if (half < 0) {
        return -1;
    }
    if (at_step(STEP_HALF_NOTE)) {
        errno = 0; /* the kernel says nothing about the rest */
        return half;
    }
    return syscall(SYS_pwrite64, fd, bytes, nbytes, offset);
}

/* -- names and notes --------------------------------------------------------------------- */

static cm_status
open_as(const char *name, uint64_t nbytes, const char *form,
        const cm_shared_token *token, cm_shared_memory **out)
{
    char found_form[CM_SHARED_FORM_NBYTES];
    cm_shared_request request = {.name = name,
                                 .nbytes = nbytes,
                                 .form = form,
                                 .numa_node = CM_NUMA_NO_NODE,
                                 .token = token};
    return cm_shared_open(&request, found_form, out);
}

/* Open the memory of this name, which has `nbytes` bytes. */
static cm_status
open_bytes(const char *name, uint64_t nbytes, cm_shared_memory **out)
{
    return open_as(name, nbytes, "bytes", NULL, out);
}

/* The name of a test, and where its note is. */
typedef struct subject {
    char name[64];
    char note[128];
} subject;

/* Choose a name that no other run of this program has. */
static subject
make_subject(const char *name)
{
    subject made;
    const char *parent = access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : "/tmp";
    (void)snprintf(made.name, sizeof(made.name), "c-test-%d-%s", (int)getpid(), name);
    (void)snprintf(made.note, sizeof(made.note), "%s/cumem-%u/%s.note", parent,
                   (unsigned)geteuid(), made.name);
    return made;
}

static bool
has_note(const subject *about)
{
    struct stat facts;
    return lstat(about->note, &facts) == 0;
}

/* Write bytes into the note, without a look at its locks. The length stays as it is,
 * unless `cuts` is true: then the note ends behind these bytes. */
static bool
spoil_note(const subject *about, off_t offset, const void *bytes, size_t nbytes,
           bool cuts)
{
    int fd = open(about->note, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    off_t end = offset + (off_t)nbytes;
    bool is_written =
        fd >= 0 && syscall(SYS_pwrite64, fd, bytes, nbytes, offset) == (long)nbytes
        && (!cuts || syscall(SYS_ftruncate, fd, end) == 0);
    (void)close(fd);
    return is_written;
}

/* Return how many descriptors this process has. */
static int
count_descriptors(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder != NULL && readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}

/* Return how many mappings of shared memory this list of a process has. */
static int
count_mappings_of(const char *path)
{
    char line[512];
    int count = 0;
    FILE *maps = fopen(path, "r");
    while (maps != NULL && fgets(line, sizeof(line), maps) != NULL) {
        count += strstr(line, "/memfd:cumem-shared") != NULL;
    }
    if (maps != NULL) {
        (void)fclose(maps);
    }
    return count;
}

static int
count_mappings(void)
{
    return count_mappings_of("/proc/self/maps");
}

/* Check that this process has no part of any shared memory, and that the name has no
 * note. */
static void
check_nothing_is_left(const subject *about, int descriptor_count)
{
    CHECK_EQ(count_descriptors(), descriptor_count);
    CHECK_EQ(count_mappings(), 0);
    CHECK(!has_note(about));
}

/* -- other processes ----------------------------------------------------------------------- */

/* Start a process that opens the memory, fills it with `value`, and then has it until
 * end_user(). Returns 0 if it cannot do so. */
static pid_t
start_user(const char *name, uint64_t nbytes, int value)
{
    int ready[2];
    if (pipe(ready) != 0) {
        return 0;
    }
    pid_t child = fork();
    if (child == 0) {
        cm_shared_memory *memory;
        (void)alarm(ALARM_SECONDS);
        if (!cm_is_ok(open_bytes(name, nbytes, &memory))) {
            _exit(1);
        }
        memset(cm_shared_host(memory), value, nbytes);
        if (write(ready[1], "x", 1) == 1) {
            (void)pause();
        }
        _exit(0);
    }
    char byte;
    (void)close(ready[1]);
    bool is_ready = read(ready[0], &byte, 1) == 1;
    (void)close(ready[0]);
    if (!is_ready) {
        (void)waitpid(child, NULL, 0);
        return 0;
    }
    return child;
}

static void
end_user(pid_t child)
{
    if (child > 0) {
        (void)kill(child, SIGKILL);
        (void)waitpid(child, NULL, 0);
    }
}

/* Open and release the memory in another process, which is killed at this step of
 * opening, or of releasing if `while_releasing`. Returns true if it came so far. */
static bool
kill_at(const char *name, uint64_t nbytes, step at, bool while_releasing)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        cm_shared_memory *memory;
        (void)alarm(ALARM_SECONDS);
        plan_kill(while_releasing ? STEP_NONE : at);
        if (cm_is_ok(open_bytes(name, nbytes, &memory))) {
            plan_kill(at);
            cm_shared_release(memory);
        }
        _exit(0);
    }
    (void)waitpid(child, &status, 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

/* -- opening ----------------------------------------------------------------------------- */

static void
test_shared_memory_of_two_users_has_the_same_bytes(void)
{
    subject about = make_subject("two users");
    int descriptor_count = count_descriptors();
    cm_shared_memory *first, *second;
    CHECK_OK(open_bytes(about.name, 5000, &first));
    CHECK_FILLED(cm_shared_host(first), 0, 5000);
    CHECK_OK(open_bytes(about.name, 5000, &second));
    CHECK(cm_shared_host(first) != cm_shared_host(second));
    cm_shared_token tokens[] = {cm_shared_token_of(first), cm_shared_token_of(second)};
    CHECK_BYTES_EQ(&tokens[0], &tokens[1], sizeof(tokens[0]));
    CHECK_EQ(cm_shared_nbytes(second), 5000);
    CHECK_STR_EQ(cm_shared_name(second), about.name);
    CHECK_STR_EQ(cm_shared_form(second), "bytes");
    memset(cm_shared_host(first), 3, 5000);
    CHECK_FILLED(cm_shared_host(second), 3, 5000);
    cm_shared_release(first);
    CHECK(has_note(&about));
    CHECK_FILLED(cm_shared_host(cm_shared_hold(second)), 3, 5000);
    cm_shared_release(second);
    CHECK_EQ(count_mappings(), 1);
    cm_shared_release(second);
    check_nothing_is_left(&about, descriptor_count);
}

static void
test_shared_memory_of_another_process_outlives_its_maker(void)
{
    subject about = make_subject("two processes");
    pid_t maker = start_user(about.name, 100, 7);
    CHECK_GT(maker, 0);
    pid_t user = start_user(about.name, 100, 8);
    CHECK_GT(user, 0);
    end_user(maker);
    cm_shared_memory *memory;
    CHECK_OK(open_bytes(about.name, 100, &memory));
    CHECK_FILLED(cm_shared_host(memory), 8, 100);
    end_user(user);
    CHECK_FILLED(cm_shared_host(memory), 8, 100);
    cm_shared_release(memory);
    CHECK(!has_note(&about));
}

static void
test_shared_memory_has_one_size_as_long_as_it_has_users(void)
{
    subject about = make_subject("sizes");
    char found_form[CM_SHARED_FORM_NBYTES] = "";
    cm_shared_memory *memory;
    pid_t user = start_user(about.name, 100, 7);
    CHECK_GT(user, 0);
    cm_shared_request request = {
        .name = about.name, .nbytes = 9000, .form = "words", .numa_node = -1};
    cm_status status = cm_shared_open(&request, found_form, &memory);
    CHECK_CODE(status, CM_ESHAPE);
    CHECK_EQ(status.arg, 100);
    CHECK_STR_EQ(found_form, "bytes");
    /* The last user is killed, so its note stays and names a size that is no longer
     * valid. */
    end_user(user);
    CHECK(has_note(&about));
    CHECK_OK(cm_shared_open(&request, found_form, &memory));
    CHECK_FILLED(cm_shared_host(memory), 0, 9000);
    CHECK_STR_EQ(cm_shared_form(memory), "words");
    CHECK_CODE(open_bytes(about.name, 100, &memory), CM_ESHAPE);
    cm_shared_token old = cm_shared_token_of(memory);
    cm_shared_release(memory);
    CHECK(!has_note(&about));
    CHECK_OK(open_bytes(about.name, 20, &memory));
    cm_shared_memory *other;
    CHECK_CODE(open_as(about.name, 20, "bytes", &old, &other), CM_ECLOSED);
    cm_shared_token token = cm_shared_token_of(memory);
    CHECK_OK(open_as(about.name, 20, "bytes", &token, &other));
    cm_shared_release(other);
    cm_shared_release(memory);
    CHECK_CODE(open_as(about.name, 20, "bytes", &token, &other), CM_ECLOSED);
    CHECK(!has_note(&about));
}

/* A pickle may ask for anything. */
static void
test_shared_memory_refuses_what_cannot_be(void)
{
    char form[CM_SHARED_FORM_NBYTES + 1];
    char name[CM_SHARED_NAME_NBYTES + 2];
    memset(form, 'x', sizeof(form));
    memset(name, 'x', sizeof(name));
    form[CM_SHARED_FORM_NBYTES] = name[CM_SHARED_NAME_NBYTES + 1] = '\0';
    subject about = make_subject("refused");
    cm_shared_memory *memory;
    CHECK_CODE(open_bytes("", 4, &memory), CM_EINVALID);
    CHECK_CODE(open_bytes("../x", 4, &memory), CM_EINVALID);
    CHECK_CODE(open_bytes(name, 4, &memory), CM_EOVERFLOW);
    CHECK_CODE(open_as(about.name, 4, form, NULL, &memory), CM_EOVERFLOW);
    CHECK_CODE(open_bytes(about.name, UINT64_MAX, &memory), CM_EOVERFLOW);
    CHECK_CODE(open_bytes(about.name, UINT64_C(1) << 50, &memory), CM_EHOSTMEMORY);
    cm_shared_request request = {
        .name = about.name, .nbytes = 4, .form = "bytes", .numa_node = 63};
    CHECK_CODE(cm_shared_open(&request, form, &memory), CM_EINVALID);
    CHECK(!has_note(&about));
    CHECK_EQ(count_mappings(), 0);
}

/* -- failures ------------------------------------------------------------------------------ */

/* Each call of the maker fails once. */
static void
test_shared_memory_that_fails_at_any_step_leaves_nothing(void)
{
    static const struct {
        step at;
        int error;
    } failures[] = {
        {STEP_GATE, ENOLCK},  {STEP_TOKEN, ENOSYS},     {STEP_MEMFD, EPERM},
        {STEP_MEMFD, EMFILE}, {STEP_SIZE, ENOSPC},      {STEP_SEAL, EINVAL},
        {STEP_NOTE, ENOSPC},  {STEP_HALF_NOTE, ENOSPC}, {STEP_USERS, ENOLCK},
    };
    subject about = make_subject("failures");
    cm_shared_memory *memory;
    int descriptor_count = count_descriptors();
    for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
        plan_failure(failures[i].at, failures[i].error);
        cm_status status = open_bytes(about.name, 100, &memory);
        CHECK_EQ(atomic_load(&plan.at), STEP_NONE);
        CHECK_CODE(status, CM_ESYSTEM);
        CHECK_EQ(status.arg, failures[i].error);
        check_nothing_is_left(&about, descriptor_count);
    }
    plan_failure(STEP_GATE, EINTR);
    CHECK_CODE(open_bytes(about.name, 100, &memory), CM_ECANCELLED);
    check_nothing_is_left(&about, descriptor_count);
    CHECK_OK(open_bytes(about.name, 100, &memory));
    cm_shared_release(memory);
    check_nothing_is_left(&about, descriptor_count);
}

/* The process may have no more than `free_count` more descriptors. */
static struct rlimit
limit_descriptors(int free_count)
{
    struct rlimit before, now;
    int lowest = open("/", O_RDONLY | O_CLOEXEC);
    (void)close(lowest);
    (void)getrlimit(RLIMIT_NOFILE, &before);
    now = before;
    now.rlim_cur = (rlim_t)(lowest + free_count);
    (void)setrlimit(RLIMIT_NOFILE, &now);
    return before;
}

/* Open the memory with ever more descriptors until that succeeds, which needs at least
 * `least`. Each failure must name the reason. */
static void
check_opens_with_few_descriptors(const subject *about, int least)
{
    cm_status status;
    cm_shared_memory *memory;
    int free_count = 0;
    for (;; free_count++) {
        int mapping_count = count_mappings();
        int descriptor_count = count_descriptors();
        struct rlimit before = limit_descriptors(free_count);
        status = open_bytes(about->name, 100, &memory);
        (void)setrlimit(RLIMIT_NOFILE, &before);
        if (cm_is_ok(status)) {
            break;
        }
        CHECK_CODE(status, CM_ESYSTEM);
        CHECK_EQ(status.arg, EMFILE);
        CHECK_EQ(count_descriptors(), descriptor_count);
        CHECK_EQ(count_mappings(), mapping_count);
        CHECK_LT(free_count, 20);
    }
    CHECK_GE(free_count, least);
    cm_shared_release(memory);
}

static void
test_shared_memory_without_descriptors_names_the_reason(void)
{
    subject about = make_subject("descriptors");
    int descriptor_count = count_descriptors();
    check_opens_with_few_descriptors(&about, 3);
    check_nothing_is_left(&about, descriptor_count);
    pid_t user = start_user(about.name, 100, 7);
    CHECK_GT(user, 0);
    check_opens_with_few_descriptors(&about, 3);
    /* A note that names no user makes it look through /proc. */
    int32_t nobody = -1;
    CHECK(spoil_note(&about, NOTE_PID_OFFSET, &nobody, sizeof(nobody), false));
    check_opens_with_few_descriptors(&about, 4);
    end_user(user);
    (void)unlink(about.note);
}

/* Files may have 1,000 bytes at most, which is less than a page. */
static void
test_shared_memory_beyond_the_limit_of_files_is_refused(void)
{
    subject about = make_subject("file size");
    int descriptor_count = count_descriptors();
    struct rlimit before, now;
    cm_shared_memory *memory;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    now = before;
    now.rlim_cur = 1000;
    (void)signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &now), 0);
    cm_status status = open_bytes(about.name, 100, &memory);
    (void)setrlimit(RLIMIT_FSIZE, &before);
    (void)signal(SIGXFSZ, SIG_DFL);
    CHECK_CODE(status, CM_ESYSTEM);
    CHECK_EQ(status.arg, EFBIG);
    check_nothing_is_left(&about, descriptor_count);
}

/* -- two users that end ---------------------------------------------------------------------- */

static cm_shared_memory *other_user;

static void
release_other_user(void)
{
    cm_shared_release(other_user);
}

/* One user has found the other one, and is still in the gate, when the other one ends
 * and so cannot take the gate. The note must go nevertheless. */
static void
test_shared_memory_of_two_users_that_end_at_once_leaves_no_note(void)
{
    subject about = make_subject("ends");
    int descriptor_count = count_descriptors();
    cm_shared_memory *memory;
    CHECK_OK(open_bytes(about.name, 100, &memory));
    CHECK_OK(open_bytes(about.name, 100, &other_user));
    plan_call(STEP_LEAVE, release_other_user);
    cm_shared_release(memory);
    CHECK_EQ(atomic_load(&plan.at), STEP_NONE);
    check_nothing_is_left(&about, descriptor_count);
}

/* The last user ends after it was found, and before its descriptor is opened. */
static void
test_shared_memory_whose_last_user_ends_meanwhile_is_made_anew(void)
{
    subject about = make_subject("ends meanwhile");
    int descriptor_count = count_descriptors();
    cm_shared_memory *memory;
    CHECK_OK(open_bytes(about.name, 100, &other_user));
    memset(cm_shared_host(other_user), 5, 100);
    plan_call(STEP_READ, release_other_user);
    CHECK_OK(open_bytes(about.name, 100, &memory));
    CHECK_FILLED(cm_shared_host(memory), 0, 100);
    cm_shared_release(memory);
    CHECK_OK(open_bytes(about.name, 100, &other_user));
    cm_shared_token token = cm_shared_token_of(other_user);
    plan_call(STEP_READ, release_other_user);
    CHECK_CODE(open_as(about.name, 100, "bytes", &token, &memory), CM_ECLOSED);
    check_nothing_is_left(&about, descriptor_count);
}

static const char *other_name;

static void
open_other_user(void)
{
    other_user = NULL;
    if (!cm_is_ok(open_bytes(other_name, 100, &other_user))) {
        other_user = NULL;
    }
}

/* The last user has begun to end, so nobody must take it for a user. */
static void
test_shared_memory_that_is_being_closed_is_made_anew(void)
{
    subject about = make_subject("closing");
    int descriptor_count = count_descriptors();
    cm_shared_memory *memory;
    other_name = about.name;
    CHECK_OK(open_bytes(about.name, 100, &memory));
    plan_call(STEP_CLOSE, open_other_user);
    cm_shared_release(memory);
    CHECK(other_user != NULL);
    cm_shared_release(other_user);
    check_nothing_is_left(&about, descriptor_count);
}

/* -- notes that are wrong -------------------------------------------------------------------- */

static void
test_shared_memory_ignores_a_note_without_users(void)
{
    subject about = make_subject("old note");
    int descriptor_count = count_descriptors();
    unsigned char wrong[NOTE_NBYTES + 100];
    memset(wrong, 0xff, sizeof(wrong));
    size_t lengths[] = {0, 1, 24, NOTE_NBYTES - 1, NOTE_NBYTES, sizeof(wrong)};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        cm_shared_memory *memory;
        CHECK(spoil_note(&about, 0, wrong, lengths[i], true));
        CHECK_OK(open_bytes(about.name, 100, &memory));
        CHECK_FILLED(cm_shared_host(memory), 0, 100);
        cm_shared_release(memory);
        check_nothing_is_left(&about, descriptor_count);
    }
}

/* Check that opening the memory fails with this code, and leaves nothing behind. */
static void
check_refused(const subject *about, int code)
{
    cm_shared_memory *memory;
    int descriptor_count = count_descriptors();
    CHECK_CODE(open_bytes(about->name, 100, &memory), code);
    CHECK_EQ(count_descriptors(), descriptor_count);
    CHECK_EQ(count_mappings(), 0);
    CHECK(has_note(about));
}

/* Somebody has written into the note, while another process has the memory. */
static void
test_shared_memory_never_makes_a_second_memory_for_a_wrong_note(void)
{
    subject about = make_subject("wrong note");
    cm_shared_memory *memory;
    unsigned char right[NOTE_NBYTES], wrong[NOTE_NBYTES];
    memset(wrong, 0xff, sizeof(wrong));
    pid_t user = start_user(about.name, 100, 7);
    CHECK_GT(user, 0);
    int fd = open(about.note, O_RDONLY | O_CLOEXEC);
    CHECK_EQ(pread(fd, right, sizeof(right), 0), NOTE_NBYTES);
    CHECK_EQ(close(fd), 0);
    CHECK(spoil_note(&about, 0, wrong, sizeof(wrong), true));
    check_refused(&about, CM_ESHAPE);
    CHECK(spoil_note(&about, 0, right, sizeof(right), true));
    CHECK(spoil_note(&about, 0, wrong, sizeof(cm_shared_token), false));
    check_refused(&about, CM_EBUSY);
    CHECK(spoil_note(&about, 0, right, sizeof(cm_shared_token), true));
    check_refused(&about, CM_EBUSY);
    /* The process number and the descriptor are wrong, but the token is not. */
    CHECK(spoil_note(&about, 0, right, sizeof(right), true));
    CHECK(spoil_note(&about, NOTE_PID_OFFSET, wrong, 8, false));
    CHECK_OK(open_bytes(about.name, 100, &memory));
    CHECK_FILLED(cm_shared_host(memory), 7, 100);
    cm_shared_release(memory);
    end_user(user);
    CHECK_EQ(unlink(about.note), 0);
}

static void
test_shared_memory_follows_no_link_in_place_of_a_note(void)
{
    subject about = make_subject("links");
    cm_shared_memory *memory;
    CHECK_OK(open_bytes(about.name, 100, &memory)); /* so that the folder exists */
    cm_shared_release(memory);
    CHECK_EQ(symlink("/dev/null", about.note), 0);
    check_refused(&about, CM_ESYSTEM);
    CHECK_EQ(unlink(about.note), 0);
    CHECK_EQ(mkdir(about.note, 0700), 0);
    check_refused(&about, CM_ESYSTEM);
    CHECK_EQ(rmdir(about.note), 0);
}

/* -- processes that are killed --------------------------------------------------------------- */

static void
test_shared_memory_of_a_maker_killed_at_any_step_is_made_anew(void)
{
    subject about = make_subject("killed maker");
    int descriptor_count = count_descriptors();
    for (int at = STEP_GATE; at < STEP_COUNT; at++) {
        cm_shared_memory *memory;
        CHECK(kill_at(about.name, 100, (step)at, false));
        CHECK(has_note(&about));
        CHECK_OK(open_bytes(about.name, 9000, &memory));
        CHECK_FILLED(cm_shared_host(memory), 0, 9000);
        cm_shared_release(memory);
        check_nothing_is_left(&about, descriptor_count);
    }
}

/* The memory has a user, and another process is killed while it opens or releases the
 * memory. */
static void
test_shared_memory_outlives_another_user_killed_at_any_step(void)
{
    static const step steps[] = {STEP_GATE, STEP_ASK_USERS, STEP_USERS, STEP_LEAVE};
    subject about = make_subject("killed user");
    int descriptor_count = count_descriptors();
    for (size_t i = 0; i < 2 * sizeof(steps) / sizeof(steps[0]); i++) {
        step at = steps[i / 2];
        bool while_releasing = i % 2 != 0;
        if (while_releasing && at == STEP_USERS) {
            continue;
        }
        pid_t user = start_user(about.name, 100, 7);
        CHECK_GT(user, 0);
        CHECK(kill_at(about.name, 100, at, while_releasing));
        cm_shared_memory *memory;
        CHECK_OK(open_bytes(about.name, 100, &memory));
        CHECK_FILLED(cm_shared_host(memory), 7, 100);
        end_user(user);
        cm_shared_release(memory);
        check_nothing_is_left(&about, descriptor_count);
    }
}

/* The last user is killed while it ends, so that its note stays. */
static void
test_shared_memory_of_a_user_killed_while_it_ends_is_made_anew(void)
{
    static const step steps[] = {STEP_GATE, STEP_ASK_USERS, STEP_LEAVE};
    subject about = make_subject("killed at the end");
    int descriptor_count = count_descriptors();
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        cm_shared_memory *memory;
        CHECK(kill_at(about.name, 100, steps[i], true));
        CHECK_OK(open_bytes(about.name, 300, &memory));
        CHECK_FILLED(cm_shared_host(memory), 0, 300);
        cm_shared_release(memory);
        check_nothing_is_left(&about, descriptor_count);
    }
}

/* -- processes that are killed in the gate, and leave a child ------------------------------- */

/* A child that outlives its parent writes its number here once the handlers of the fork
 * have run. */
static int orphans[2];

/* Fork a child that lives until it is killed. */
static void
fork_orphan(void)
{
    pid_t child = fork();
    if (child == 0) {
        pid_t self = getpid();
        (void)alarm(ALARM_SECONDS);
        if (write(orphans[1], &self, sizeof(self)) == sizeof(self)) {
            (void)pause();
        }
        _exit(0);
    }
}

static void
fork_orphan_and_die(void)
{
    fork_orphan();
    (void)kill(getpid(), SIGKILL);
}

/* Open the memory in another process, in which `acts` is called at this step. It must
 * leave a child and end the process. Returns the child, or 0 if there is none. */
static pid_t
make_orphan(const char *name, step at, void (*acts)(void))
{
    pid_t orphan = 0;
    /* The orphans of this process's children become its own, so that it can wait for
     * their end. */
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0 || pipe(orphans) != 0) {
        return 0;
    }
    pid_t child = fork();
    if (child == 0) {
        cm_shared_memory *memory;
        (void)alarm(ALARM_SECONDS);
        plan_call(at, acts);
        (void)open_bytes(name, 100, &memory);
        _exit(1);
    }
    (void)close(orphans[1]);
    if (read(orphans[0], &orphan, sizeof(orphan)) != sizeof(orphan)) {
        orphan = 0;
    }
    (void)close(orphans[0]);
    (void)waitpid(child, NULL, 0);
    return orphan;
}

/* True if nobody has the gate. */
static bool
is_gate_free(const subject *about)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    int fd = open(about->note, O_RDWR | O_CLOEXEC);
    bool is_free = fd >= 0 && syscall(SYS_fcntl, fd, F_OFD_SETLK, &lock) == 0;
    (void)close(fd);
    return is_free;
}

/* True if a process has a mapping or a descriptor of any shared memory. */
static bool
has_shared_memory(pid_t process)
{
    char path[64], place[320], link[128];
    (void)snprintf(path, sizeof(path), "/proc/%d/maps", (int)process);
    bool found = count_mappings_of(path) > 0;
    (void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)process);
    DIR *folder = opendir(path);
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        (void)snprintf(place, sizeof(place), "%s/%s", path, entry->d_name);
        ssize_t length = readlink(place, link, sizeof(link) - 1);
        link[length > 0 ? length : 0] = '\0';
        found = found || strstr(link, "cumem-shared") != NULL;
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
    return found;
}

/* Check that a third process can use the name while the orphan lives, and that the
 * memory is gone when it has ended. */
static void
check_orphan_holds_up_nobody(const subject *about, pid_t orphan, int descriptor_count)
{
    cm_shared_memory *memory;
    CHECK_GT(orphan, 0);
    if (!is_gate_free(about)) {
        end_user(orphan);
        CHECK(!"the orphan keeps the gate shut");
    }
    CHECK_OK(open_bytes(about->name, 100, &memory));
    CHECK_FILLED(cm_shared_host(memory), 0, 100);
    cm_shared_release(memory);
    end_user(orphan);
    CHECK_OK(open_bytes(about->name, 9000, &memory));
    cm_shared_release(memory);
    check_nothing_is_left(about, descriptor_count);
}

static void
test_shared_memory_of_a_maker_killed_after_a_fork_is_made_anew(void)
{
    subject about = make_subject("forks");
    int descriptor_count = count_descriptors();
    for (int at = STEP_GATE; at < STEP_COUNT; at++) {
        pid_t orphan = make_orphan(about.name, (step)at, fork_orphan_and_die);
        if (at == STEP_POPULATE) {
            CHECK(!has_shared_memory(orphan));
        }
        check_orphan_holds_up_nobody(&about, orphan, descriptor_count);
    }
}

static atomic_bool has_forked;

static void *
fork_from_thread(void *unused)
{
    fork_orphan();
    atomic_store(&has_forked, true);
    return unused;
}

static void
wait_and_die(void)
{
    WAIT_UNTIL(atomic_load(&has_forked));
    (void)kill(getpid(), SIGKILL);
}

/* Another thread forks, as far as it is not held up. After that the plan is to be
 * killed in the gate. */
static void
fork_meanwhile_and_die(void)
{
    cm_thread thread;
    if (!cm_is_ok(cm_thread_start(&thread, fork_from_thread, NULL))) {
        _exit(1);
    }
    let_others_run();
    plan_call(STEP_ASK_USERS, wait_and_die);
}

/* Another thread forks between the call that opens the note and whatever follows it. */
static void
test_shared_memory_whose_note_is_opened_during_a_fork_has_a_free_gate(void)
{
    subject about = make_subject("fork while opening");
    int descriptor_count = count_descriptors();
    pid_t orphan = make_orphan(about.name, STEP_OPENED, fork_meanwhile_and_die);
    check_orphan_holds_up_nobody(&about, orphan, descriptor_count);
}

MAIN(
    RUN(test_shared_memory_of_two_users_has_the_same_bytes) RUN(
        test_shared_memory_of_another_process_outlives_its_maker)
        RUN(test_shared_memory_has_one_size_as_long_as_it_has_users) RUN(
            test_shared_memory_refuses_what_cannot_be)
            RUN(test_shared_memory_that_fails_at_any_step_leaves_nothing) RUN(
                test_shared_memory_without_descriptors_names_the_reason)
                RUN(test_shared_memory_beyond_the_limit_of_files_is_refused) RUN(
                    test_shared_memory_of_two_users_that_end_at_once_leaves_no_note)
                    RUN(test_shared_memory_whose_last_user_ends_meanwhile_is_made_anew) RUN(
                        test_shared_memory_that_is_being_closed_is_made_anew)
                        RUN(test_shared_memory_ignores_a_note_without_users) RUN(
                            test_shared_memory_never_makes_a_second_memory_for_a_wrong_note)
                            RUN(test_shared_memory_follows_no_link_in_place_of_a_note) RUN(
                                test_shared_memory_of_a_maker_killed_at_any_step_is_made_anew)
                                RUN(test_shared_memory_outlives_another_user_killed_at_any_step) RUN(
                                    test_shared_memory_of_a_user_killed_while_it_ends_is_made_anew)
                                    RUN(test_shared_memory_of_a_maker_killed_after_a_fork_is_made_anew)
                                        RUN(test_shared_memory_whose_note_is_opened_during_a_fork_has_a_free_gate))
