# SPDX-License-Identifier: Apache-2.0
"""What notebooks show: displays of objects, and the magics of ``%load_ext cumem``."""
