# SPDX-License-Identifier: Apache-2.0
"""Operations of many copies: several devices, pipelines, loaders, offloading."""
