# SPDX-License-Identifier: Apache-2.0
"""Entry of ``python -m cumem``."""

import sys

from cumem.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
