/* SPDX-License-Identifier: Apache-2.0 */
/* The text of a range and the call of the tool. */
#include "base/nvtx.h"

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
