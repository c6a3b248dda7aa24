/* SPDX-License-Identifier: Apache-2.0 */
/* Which route a row is. Only tests ask that: the core asks the row what it does. */
#pragma once

#include "transfer/plan/route.h"

static inline cm_route
route_of(const cm_route_row *row)
{
    return row == NULL ? CM_ROUTE_NOTHING : (cm_route)(row - cm_routes);
}
