# SPDX-License-Identifier: Apache-2.0
"""Devices: finding and opening them, and waiting for their work."""
