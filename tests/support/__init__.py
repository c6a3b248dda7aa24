# SPDX-License-Identifier: Apache-2.0
"""Code that several tests share."""
