# SPDX-License-Identifier: Apache-2.0
"""Allocators of other libraries, served by cumem's pools."""
