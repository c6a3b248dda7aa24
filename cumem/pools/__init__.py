# SPDX-License-Identifier: Apache-2.0
"""Pools with their counters and limits, and what is done when memory runs out."""
