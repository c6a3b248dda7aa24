# SPDX-License-Identifier: Apache-2.0
"""Users import `cumem.tools.info` by this shorter name; it takes this module's place."""

import sys

from cumem.tools import info
from cumem.tools.info import *  # noqa: F403 - for type checkers

sys.modules[__name__] = info
