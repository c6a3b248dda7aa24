# SPDX-License-Identifier: Apache-2.0
"""Has pools, their counters and limits, and what is done when memory runs out."""
