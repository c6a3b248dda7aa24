# SPDX-License-Identifier: Apache-2.0
"""Helpers of the whole package: units, kinds of memory, errors, variables and locks."""
