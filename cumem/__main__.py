# SPDX-License-Identifier: Apache-2.0
"""``python -m cumem`` runs this module, which calls the command line."""

import sys

from cumem.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
