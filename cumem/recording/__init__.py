# SPDX-License-Identifier: Apache-2.0
"""Records of what happens to memory (allocations, copies and so on), and their readers."""
