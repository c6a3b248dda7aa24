# SPDX-License-Identifier: Apache-2.0
"""Displays cumem's objects in notebooks, and adds the magics of ``%load_ext cumem``."""
