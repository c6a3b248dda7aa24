# SPDX-License-Identifier: Apache-2.0
"""Memory of other libraries: DLPack, the array interfaces, nested data, and pickles."""
