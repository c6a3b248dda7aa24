# SPDX-License-Identifier: Apache-2.0
"""Pools, what they count, what limits them, and what happens when memory runs out."""
