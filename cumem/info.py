# SPDX-License-Identifier: Apache-2.0
"""A shorter name for users to import: `cumem.tools.info` itself replaces this module."""

import sys

from cumem.tools import info
from cumem.tools.info import *  # noqa: F403 - for type checkers

sys.modules[__name__] = info
