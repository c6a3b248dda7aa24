# SPDX-License-Identifier: Apache-2.0
"""Devices: which there are, what opens them, and how to wait for their work."""
