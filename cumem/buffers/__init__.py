# SPDX-License-Identifier: Apache-2.0
"""Buffers made of values, and what a buffer says: texts, numbers, casts, refusals."""
