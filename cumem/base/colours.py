# SPDX-License-Identifier: Apache-2.0
"""Gives kinds and states of memory the same colours in notebooks, plots and pages."""

from typing import Final

#: The palette of Okabe and Ito, whose colours colour-blind readers can tell apart.
KIND_COLOURS: Final = {
    "device": "#d55e00",
    "managed": "#cc79a7",
    "pinned": "#0072b2",
    "mapped": "#009e73",
    "registered": "#56b4e9",
    "staging": "#e69f00",
    "pageable": "#7f7f7f",
}
STATE_COLOURS: Final = {
    "live": "#0072b2",
    "in flight": "#e69f00",
    "cached": "#56b4e9",
    "free": "",  # the page's own colour
    "gap": "",
}
