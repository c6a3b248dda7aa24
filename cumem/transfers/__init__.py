# SPDX-License-Identifier: Apache-2.0
"""Makes many copies, for several devices, pipelines, loaders and offloading."""
