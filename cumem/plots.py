# SPDX-License-Identifier: Apache-2.0
"""Users import `cumem.tools.plots` by this shorter name; it takes this module's place."""

import sys

from cumem.tools import plots
from cumem.tools.plots import *  # noqa: F403 - for type checkers

sys.modules[__name__] = plots
