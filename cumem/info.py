# SPDX-License-Identifier: Apache-2.0
"""The name by which users import `cumem.tools.info`, which takes this module's place."""

import sys

from cumem.tools import info
from cumem.tools.info import *  # noqa: F403 - for type checkers

sys.modules[__name__] = info
