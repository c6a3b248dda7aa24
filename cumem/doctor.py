# SPDX-License-Identifier: Apache-2.0
"""Users import `cumem.tools.doctor` by this shorter name; it takes this module's place."""

import sys

from cumem.tools import doctor
from cumem.tools.doctor import *  # noqa: F403 - for type checkers

sys.modules[__name__] = doctor
