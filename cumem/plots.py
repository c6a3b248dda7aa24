# SPDX-License-Identifier: Apache-2.0
"""The name by which users import `cumem.tools.plots`, which takes this module's place."""

import sys

from cumem.tools import plots
from cumem.tools.plots import *  # noqa: F403 - for type checkers

sys.modules[__name__] = plots
