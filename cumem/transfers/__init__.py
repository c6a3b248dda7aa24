# SPDX-License-Identifier: Apache-2.0
"""Operations that make many copies: several devices, pipelines, loaders and offloading."""
