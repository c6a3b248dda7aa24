# SPDX-License-Identifier: Apache-2.0
"""What every room uses: units, kinds of memory, errors, variables, locks."""
