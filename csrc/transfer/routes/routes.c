/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/routes.h"

const cm_route_row cm_routes[CM_ROUTE_COUNT] = {
    [CM_ROUTE_NOTHING] = {.text = "nothing"},
#define CM_ROUTE_ROW(name, text_, suits_, move_, ...)                                  \
    [CM_ROUTE_##name] = {.text = text_, .suits = suits_, .move = move_, __VA_ARGS__},
    CM_ROUTES(CM_ROUTE_ROW)
#undef CM_ROUTE_ROW
#define CM_ROUTE_ROW(name, text_, move_, ...)                                          \
    [CM_ROUTE_##name] = {.text = text_, .move = move_, __VA_ARGS__},
        CM_ROUTES_OF_MANY(CM_ROUTE_ROW)
#undef CM_ROUTE_ROW
            [CM_ROUTE_SEVERAL] = {.text = "several"},
};

const cm_route_row *
cm_route_choose(cm_plan *plan, const cm_plan_ends *ends)
{
    const cm_route_row *row = &cm_routes[CM_ROUTE_NOTHING + 1];
    while (!row->suits(plan, ends)) {
        row++; /* the last row of CM_ROUTES suits every plan */
    }
    return row;
}
