/* SPDX-License-Identifier: Apache-2.0 */
/* Tells which route a row of the table of routes is. Only tests ask this; the core asks
 * the row for its properties instead. */
#pragma once

#include "transfer/plan/route.h"

static inline cm_route
route_of(const cm_route_row *row)
{
    return row == NULL ? CM_ROUTE_NOTHING : (cm_route)(row - cm_routes);
}
