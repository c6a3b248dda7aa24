# SPDX-License-Identifier: Apache-2.0
"""A shorter name for users to import: `cumem.base.units` itself replaces this module."""

import sys

from cumem.base import units
from cumem.base.units import *  # noqa: F403 - for type checkers

sys.modules[__name__] = units
