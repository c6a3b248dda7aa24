# SPDX-License-Identifier: Apache-2.0
"""Files: raw bytes, NumPy's formats and safetensors."""
