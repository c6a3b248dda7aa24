# SPDX-License-Identifier: Apache-2.0
"""What every room of the package uses: units, kinds of memory, errors, variables, locks."""
