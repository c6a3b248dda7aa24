# SPDX-License-Identifier: Apache-2.0
"""Gives the whole package its units, kinds of memory, errors, variables and locks."""
