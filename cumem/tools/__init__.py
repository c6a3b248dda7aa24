# SPDX-License-Identifier: Apache-2.0
"""Tools for people: the command line, doctor, bench, replay, notebooks and plots."""
