# SPDX-License-Identifier: Apache-2.0
"""A shorter name for users to import: `cumem.tools.doctor` itself replaces this module."""

import sys

from cumem.tools import doctor
from cumem.tools.doctor import *  # noqa: F403 - for type checkers

sys.modules[__name__] = doctor
