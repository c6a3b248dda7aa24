/* SPDX-License-Identifier: Apache-2.0 */
/* Has the table of routes, and finds the row that suits a plan. */
#include "transfer/routes/routes.h"

const cm_route_row cm_routes[CM_ROUTE_COUNT] = {
    [CM_ROUTE_NOTHING] = {.text = "nothing"},
#define CM_ROUTE_ROW(name, text_, suits_, move_, ...)                                  \
    [CM_ROUTE_##name] = {.text = text_,                                                \
                         .index = CM_ROUTE_##name,                                     \
                         .suits = suits_,                                              \
                         .move = move_,                                                \
                         __VA_ARGS__},
    CM_ROUTES(CM_ROUTE_ROW)
#undef CM_ROUTE_ROW
#define CM_ROUTE_ROW(name, text_, move_, ...)                                          \
    [CM_ROUTE_##name] = {                                                              \
        .text = text_, .index = CM_ROUTE_##name, .move = move_, __VA_ARGS__},
        CM_ROUTES_OF_MANY(CM_ROUTE_ROW)
#undef CM_ROUTE_ROW
            [CM_ROUTE_SEVERAL] = {.text = "several", .index = CM_ROUTE_SEVERAL},
};

static unsigned
find_ends(const cm_plan *plan, const cm_plan_ends *ends)
{
    if (plan->device < 0) {
        return CM_ENDS_HOST;
    }
    if (plan->device != plan->src_device) {
        return CM_ENDS_DEVICES;
    }
    /* If none of the calls for fills suits, a fill is done as a copy on the device
     * whose source repeats itself, so the rows for one device are tried too. */
    return ends->options->is_fill ? CM_ENDS_FILL | CM_ENDS_DEVICE : CM_ENDS_DEVICE;
}

const cm_route_row *
cm_route_choose(cm_plan *plan, const cm_plan_ends *ends)
{
    unsigned found = find_ends(plan, ends);
    const cm_route_row *row = &cm_routes[CM_ROUTE_NOTHING + 1];
    while ((row->ends & found) == 0 || !row->suits(plan, ends)) {
        row++; /* for each sort of ends the last row suits every plan */
    }
    return row;
}
