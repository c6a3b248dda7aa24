/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the text of a range, calls the tool, and attaches a tool.
 *
 * This is a client of NVTX 3. A tool is a library that exports
 * InitializeInjectionNvtx2. That function asks its client for a table of slots for each
 * module of NVTX, and writes the addresses of its own functions into the slots. The
 * structs below have the layout that nvtxTypes.h declares, which is the same in all 3.x
 * versions. So neither the build nor the wheel needs NVTX. Ranges need three functions
 * of one module. What a tool writes for other modules goes to slots that nobody
 * reads. */
#include "base/nvtx.h"

#include <dlfcn.h>
#include <stdio.h>

_Atomic(const cm_nvtx_tool *) cm_nvtx_tool_now;

const cm_nvtx_tool *
cm_nvtx_push(const char *what, uint64_t nbytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    const cm_nvtx_tool *tool = atomic_load(&cm_nvtx_tool_now);
    int unit = (63 - __builtin_clzll(nbytes | 1)) / 10;
    double size = (double)nbytes / (double)(UINT64_C(1) << 10 * unit);
    char text[64];
    (void)snprintf(text, sizeof(text), nbytes == 0 ? "%s" : "%s %.4g %s", what, size,
                   units[unit]);
    const struct { /* laid out as nvtxEventAttributes_t of version 3 */
        uint16_t version, nbytes;
        uint32_t category, color_type, color, payload_type, reserved;
        uint64_t payload, text_type;
        const char *text;
    } range = {3, sizeof(range), 0, 0, 0, 1, 0, nbytes, 1, text};
    (void)tool->push(tool->domain, &range);
    return tool;
}

void
cm_nvtx_pop(const cm_nvtx_tool *const *tool)
{
    if (*tool != NULL) {
        (void)(*tool)->pop((*tool)->domain);
    }
}

/* ---- attaching a tool ---------------------------------------------------------------- */

typedef void (*any_function)(void);

enum {
    MODULE_CORE2 = 5, /* the module with the functions of domains */
    MODULE_LAST = 6,
    SLOT_PUSH = 4,    /* nvtxDomainRangePushEx */
    SLOT_POP = 5,     /* nvtxDomainRangePop */
    SLOT_CREATE = 12, /* nvtxDomainCreateA */
    SLOT_COUNT = 16,  /* each module has fewer */
    EXPORT_CALLBACKS = 1,
    EXPORT_VERSION_INFO = 3,
};

/* The tool writes its functions of the module CORE2 to the first of these, and all
 * others to the second. */
static any_function core2_functions[SLOT_COUNT];
static any_function unused_function;

/* For each module the tool gets a list of pointers to slots, which begins and ends with
 * NULL. */
static any_function *core2_slots[SLOT_COUNT + 1];
static any_function *unused_slots[SLOT_COUNT + 1];

static int
give_table(int module, any_function ***table, unsigned *count)
{
    if (module < 1 || module > MODULE_LAST) {
        return 0;
    }
    if (table != NULL) {
        *table = module == MODULE_CORE2 ? core2_slots : unused_slots;
    }
    if (count != NULL) {
        *count = SLOT_COUNT;
    }
    return 1;
}

static void
set_version(uint32_t version)
{
    (void)version; /* every tool of version 3 has the slots above */
}

/* Return the export with this number. A tool asks for exports before anything else. */
static const void *
give_export(uint32_t number)
{
    static const struct {
        size_t nbytes;
        int (*give_table)(int module, any_function ***table, unsigned *count);
    } callbacks = {sizeof(callbacks), give_table};
    static const struct {
        size_t nbytes;
        uint32_t version, reserved;
        void (*set_version)(uint32_t version);
    } version_info = {sizeof(version_info), 3, 0, set_version};
    switch (number) {
    case EXPORT_CALLBACKS:
        return &callbacks;
    case EXPORT_VERSION_INFO:
        return &version_info;
    default:
        return NULL;
    }
}

static void
fill_slots(void)
{
    for (int i = 1; i < SLOT_COUNT; i++) {
        core2_functions[i] = NULL; /* a tool that refused may have written some */
        core2_slots[i] = &core2_functions[i];
        unused_slots[i] = &unused_function;
    }
}

/* Let the loaded tool fill the slots. If it has filled those of ranges, ranges are
 * reported to it from now on. Returns whether that is so. */
static bool
listen_to(int (*initialize)(const void *(*give)(uint32_t)))
{
    static cm_nvtx_tool tool;
    fill_slots();
    if (initialize(give_export) == 0 || core2_functions[SLOT_PUSH] == NULL
        || core2_functions[SLOT_POP] == NULL) {
        return false;
    }
    any_function create = core2_functions[SLOT_CREATE];
    tool.push = (int (*)(void *, const void *))core2_functions[SLOT_PUSH];
    tool.pop = (int (*)(void *))core2_functions[SLOT_POP];
    tool.domain = create == NULL ? NULL : ((void *(*)(const char *))create)("cumem");
    atomic_store(&cm_nvtx_tool_now, &tool);
    return true;
}

bool
cm_nvtx_attach(const char *path, char *reason, size_t capacity)
{
    static atomic_bool is_loaded;
    if (atomic_exchange(&is_loaded, true)) {
        return true;
    }
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL) {
        (void)snprintf(reason, capacity, "%s", dlerror());
        goto fail;
    }
    union { /* dlsym() gives functions as pointers to data */
        void *symbol;
        int (*initialize)(const void *(*give)(uint32_t));
    } found = {dlsym(library, "InitializeInjectionNvtx2")};
    if (found.symbol == NULL) {
        (void)snprintf(reason, capacity, "%s", dlerror());
        goto fail;
    }
    if (!listen_to(found.initialize)) {
        (void)snprintf(reason, capacity, "it refused");
        goto fail;
    }
    return true;
fail:
    /* Keep nothing of the tool, so that the next call may ask this tool again, or
     * another one. A tool that refuses expects to be unloaded, because NVIDIA's own
     * client unloads it. */
    if (library != NULL) {
        (void)dlclose(library);
    }
    atomic_store(&is_loaded, false);
    return false;
}
