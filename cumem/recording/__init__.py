# SPDX-License-Identifier: Apache-2.0
"""What happened to memory: a record of allocations, copies and so on, and its readers."""
