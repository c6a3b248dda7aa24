# SPDX-License-Identifier: Apache-2.0
"""Buffers that are made from values, and the texts, casts and refusals of all buffers."""
