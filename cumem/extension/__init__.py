# SPDX-License-Identifier: Apache-2.0
"""What the extension leaves to Python: rarely called, long to say, or made of Python."""
