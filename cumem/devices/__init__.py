# SPDX-License-Identifier: Apache-2.0
"""Finds devices, opens them and waits for their work."""
