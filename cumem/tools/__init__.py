# SPDX-License-Identifier: Apache-2.0
"""Tools beside the library: the command line, doctor, bench, replay, notebooks, plots."""
