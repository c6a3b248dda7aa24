# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files of raw bytes, NumPy's files and safetensors files."""
