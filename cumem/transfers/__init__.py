# SPDX-License-Identifier: Apache-2.0
"""Many copies at once: several devices, pipelines, loaders, offloading."""
