# SPDX-License-Identifier: Apache-2.0
"""Devices, and what streams, events and transfers of them are waited for with."""
