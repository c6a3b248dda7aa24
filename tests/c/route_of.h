/* SPDX-License-Identifier: Apache-2.0 */
/* Says which route a row is. Only tests ask that: the core asks the row for its
 * properties. */
#pragma once

#include "transfer/plan/route.h"

static inline cm_route
route_of(const cm_route_row *row)
{
    return row == NULL ? CM_ROUTE_NOTHING : (cm_route)(row - cm_routes);
}
