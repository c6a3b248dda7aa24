# SPDX-License-Identifier: Apache-2.0
"""A shorter name for users to import: `cumem.tools.plots` itself replaces this module."""

import sys

from cumem.tools import plots
from cumem.tools.plots import *  # noqa: F403 - for type checkers

sys.modules[__name__] = plots
