# SPDX-License-Identifier: Apache-2.0
"""Notebooks: displays of cumem's objects, and the magics of ``%load_ext cumem``."""
