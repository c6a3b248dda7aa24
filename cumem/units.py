# SPDX-License-Identifier: Apache-2.0
"""Users import `cumem.base.units` by this shorter name; it takes this module's place."""

import sys

from cumem.base import units
from cumem.base.units import *  # noqa: F403 - for type checkers

sys.modules[__name__] = units
