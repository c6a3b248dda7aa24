# SPDX-License-Identifier: Apache-2.0
"""What happened to memory: a record of allocations, copies and the rest, and what reads it."""
