# SPDX-License-Identifier: Apache-2.0
# Overloads of the constructors for type checkers, which see from the kind or the pool what
# type of buffer a call returns. constructors.py has the signatures with their defaults and
# the docstrings. mypy checks its code without this file (pyproject.toml), and
# tests/house/test_stubs.py compares the two.
from typing import Literal, TypedDict, TypeVar, Unpack, overload

from numpy.typing import DTypeLike

from cumem import _core
from cumem.base.kinds import Kind
from cumem.pools.pool import Pool

_B = TypeVar("_B", bound=_core.Buffer)

class _Place(TypedDict, total=False):
    """The keywords that all constructors take, beside a kind and a pool."""

    device: object
    stream: object

class _Like(_Place, total=False):
    order: _core._LikeOrder | None

class _LikeFilled(_Like, total=False):
    casting: _core._Casting | None

class _Shared(_Like, total=False):
    copy: bool | None

@overload
def array(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    pool: None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.DeviceBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    pool: Pool[_B],
    **options: Unpack[_LikeFilled],
) -> _B: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None,
    kind: Literal["pinned"],
    *,
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.PinnedBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["pinned"],
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.PinnedBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None,
    kind: Literal["mapped"],
    *,
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.MappedBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["mapped"],
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.MappedBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None,
    kind: Literal["managed"],
    *,
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.ManagedBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["managed"],
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.ManagedBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None,
    kind: Literal["device"],
    *,
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.DeviceBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["device"],
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.DeviceBuffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None,
    kind: Kind,
    *,
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.Buffer: ...
@overload
def array(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Kind,
    pool: Pool | None = ...,
    **options: Unpack[_LikeFilled],
) -> _core.Buffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None = ...,
    kind: None = ...,
    *,
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.Buffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None,
    kind: Literal["pinned"],
    *,
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.PinnedBuffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["pinned"],
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.PinnedBuffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None,
    kind: Literal["mapped"],
    *,
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.MappedBuffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["mapped"],
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.MappedBuffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None,
    kind: Literal["managed"],
    *,
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.ManagedBuffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["managed"],
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.ManagedBuffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None,
    kind: Literal["device"],
    *,
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.DeviceBuffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["device"],
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.DeviceBuffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None,
    kind: Kind | None,
    *,
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.Buffer: ...
@overload
def asarray(
    obj: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Kind | None,
    pool: Pool | None = ...,
    **options: Unpack[_Shared],
) -> _core.Buffer: ...
