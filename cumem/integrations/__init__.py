# SPDX-License-Identifier: Apache-2.0
"""Lets other libraries allocate their memory from cumem's pools."""
