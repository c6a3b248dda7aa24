# SPDX-License-Identifier: Apache-2.0
"""Has the tools for people, such as the command line, doctor, bench and replay."""
