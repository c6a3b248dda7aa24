/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/routes.h"

const cm_route_row cm_routes[CM_ROUTE_COUNT] = {
    [CM_ROUTE_NOTHING] = {.text = "nothing"},
#define CM_ROUTE_ROW(name, text_, move_, suits_, ...)                                  \
    [CM_ROUTE_##name] = {.text = text_, .move = move_, .suits = suits_, __VA_ARGS__},
    CM_ROUTES(CM_ROUTE_ROW)
#undef CM_ROUTE_ROW
        [CM_ROUTE_SEVERAL] = {.text = "several"},
};
