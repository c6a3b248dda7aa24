# SPDX-License-Identifier: Apache-2.0
"""For names and calls of other libraries that cumem lacks, errors say what to type.

The tests call each of them on each kind of memory, match the message, and try what the
message says.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.strategies import (
    KINDS,
)

import cumem
from cumem.buffers import hints


@pytest.mark.parametrize("kind", KINDS)
def test_missing_members_say_what_to_type(runtime, kind) -> None:
    buffer = cumem.empty(3, kind=kind)
    for name in hints.NAMES:
        assert not hasattr(buffer, name)
        assert name in vars(cumem.Buffer)
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; "):
            getattr(buffer, name)
    assert not hints.NAMES & {*dir(buffer)}
    assert "ravel" in dir(buffer)
    assert hints.MANAGED_MEMBERS.keys().isdisjoint(dir(buffer))
    for stated, owner in (
        (hints.STREAM_MEMBERS, cumem.current_stream()),
        (hints.EVENT_MEMBERS, cumem.Event()),
        (hints.TRANSFER_MEMBERS, cumem.copy_async(np.zeros(3), np.ones(3))),
        (hints.POOL_MEMBERS, cumem.default_pool(kind)),
    ):
        assert stated.keys().isdisjoint(dir(owner))
        for name, hint in stated.items():
            assert not hasattr(owner, name)
            with pytest.raises(AttributeError, match=re.escape(f"use {hint}")):
                getattr(owner, name)


@pytest.mark.parametrize("kind", KINDS)
def test_no_hint_sends_the_host_to_device_memory(runtime, kind) -> None:
    buffer: Any = cumem.zeros((2, 2), kind=kind)
    calls: dict[str, Callable[[], object]] = {
        "take": lambda: buffer.take(0),
        "indices": lambda: buffer[[0, 1]],
        "truth": lambda: bool(buffer),
    }
    reported, other = "buf.numpy()", "buf.to_numpy()"
    if kind == "device":
        reported, other = other, reported
    for name, call in calls.items():
        with pytest.raises((AttributeError, IndexError, ValueError)) as caught:
            call()
        assert reported in str(caught.value), name
        assert other not in str(caught.value), name


def test_hints_are_those_of_the_extension() -> None:
    """A name that only the package had would never be mentioned, and one that only the
    extension had would raise a KeyError.
    """
    doc = "Not there: its error says why."
    for owner, stated in (
        (cumem.Buffer, hints.NAMES),
        (cumem.ManagedBuffer, {*hints.MANAGED_MEMBERS}),
        (cumem.Stream, {*hints.STREAM_MEMBERS}),
        (cumem.Event, {*hints.EVENT_MEMBERS}),
        (cumem.Transfer, {*hints.TRANSFER_MEMBERS}),
        (cumem._core._Pool, {*hints.POOL_MEMBERS}),
    ):
        assert {n for n, m in vars(owner).items() if m.__doc__ == doc} == stated


def test_protocols_are_probed_as_before(runtime) -> None:
    """Other libraries look for these names, and must find nothing or a true answer."""
    buffer = cumem.empty_pinned(3)
    for name in ("__array_interface__", "__array_struct__", "__array_ufunc__"):
        assert not hasattr(buffer, name)
        assert name not in dir(buffer)
    assert not hasattr(buffer, "__cuda_array_interface__")
    assert not hasattr(type(buffer), "__getattr__")


#: Operators of two operands, and those that change the left one.
OPERATORS: dict[str, Callable[[Any, Any], object]] = {
    name: getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
        *("and_", "or_", "xor", "lshift", "rshift", "lt", "le", "gt", "ge"),
    )
} | {"divmod": divmod}
IN_PLACE: dict[str, Callable[[Any, Any], object]] = {
    name: getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
}
UNARY: dict[str, Callable[[Any], object]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
    "round": round,
    "round to": lambda buf: round(buf, 2),
}


def check_says_where_to_compute(kind: str, call: Callable[[], object]) -> None:
    """Check that arithmetic fails with an error that says which views can compute.

    The host can read memory of a device only through a copy, and all other memory through a
    view.
    """
    reported, other = "buf.numpy()", "buf.to_numpy()"
    if kind == "device":
        reported, other = other, reported
    with pytest.raises(TypeError, match="buffers do not compute: use ") as caught:
        call()
    for hint in ("cupy.asarray(buf)", "torch.from_dlpack(buf)", reported):
        assert hint in str(caught.value)
    assert other not in str(caught.value)


@pytest.mark.parametrize("name", [*OPERATORS, *IN_PLACE])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_say_where_to_compute(runtime, kind, name) -> None:
    compute = (OPERATORS | IN_PLACE)[name]
    buffer = cumem.zeros(3, "i4", kind)
    for other in (1, 1.5, True, 2j, [1, 2, 3], (1, 2, 3), cumem.zeros(3, kind=kind)):
        check_says_where_to_compute(kind, lambda: compute(buffer, other))  # noqa: B023
        if name in OPERATORS:
            check_says_where_to_compute(kind, lambda: compute(other, buffer))  # noqa: B023


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_one_operand_say_where_to_compute(runtime, kind, name) -> None:
    buffer = cumem.zeros(3, "i4", kind)
    check_says_where_to_compute(kind, lambda: UNARY[name](buffer))


@pytest.mark.parametrize("of", [sum, max, min, sorted])
@pytest.mark.parametrize("kind", KINDS)
def test_what_python_computes_with_says_where_to_compute(runtime, kind, of) -> None:
    buffer = cumem.zeros((3, 2), "i4", kind)
    check_says_where_to_compute(kind, lambda: of(buffer))


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("kind", KINDS)
def test_no_operator_in_place_makes_a_buffer_an_array(runtime, kind, name) -> None:
    """With such an operator NumPy would make a new array, and leave the buffer as it is."""
    buffer = cumem.zeros((3, 3), "i4", kind)
    for other in (np.ones((3, 3), "i4"), np.int32(1), "text", None):
        check_says_where_to_compute(kind, lambda: IN_PLACE[name](buffer, other))  # noqa: B023


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed"])
def test_operators_with_numpys_arrays_are_numpys(runtime, kind, name) -> None:
    compute = OPERATORS[name]
    array, other = np.arange(1, 4), np.array([3, 1, 2])
    buffer = cumem.array(array, kind=kind)
    for each in (other, other[0]):
        if name == "matmul" and each.ndim == 0:
            continue
        for found, expected in (
            (compute(buffer, each), compute(array, each)),
            (compute(each, buffer), compute(each, array)),
        ):
            assert np.array_equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_strangers_are_theirs_or_pythons_error(runtime, name) -> None:
    class Stranger:
        """An object that answers every operator."""

        def answer(self, other: object) -> str:
            return "theirs"

        __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = answer
        __rfloordiv__ = __rmod__ = __rpow__ = __rand__ = __ror__ = __rxor__ = answer
        __rlshift__ = __rrshift__ = __rdivmod__ = answer
        __lt__ = __le__ = __gt__ = __ge__ = answer

    buffer = cumem.zeros(3, "i4", "pinned")
    assert OPERATORS[name](buffer, Stranger()) == "theirs"
    with pytest.raises(TypeError, match=r"not supported|unsupported operand"):
        OPERATORS[name](buffer, object())


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed"])
def test_numpy_computes_on_host_memory(runtime, kind) -> None:
    buffer = cumem.array([1.0, 2.0, 3.0], kind=kind)
    array = np.ones(3)
    assert (buffer + array).tolist() == (array + buffer).tolist() == [2, 3, 4]  # type: ignore[operator]
    assert (buffer * np.float64(2)).tolist() == [2, 4, 6]  # type: ignore[operator]
    assert np.add(buffer, 1).tolist() == [2, 3, 4]  # type: ignore[call-overload]
    assert np.sum(buffer) == 6  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "compute",
    [
        lambda buf: np.add(buf, 1),
        lambda buf: np.sum(buf),
        lambda buf: buf + np.ones(3),
        lambda buf: np.float64(2) * buf,
        lambda buf: np.asarray(buf),
    ],
)
def test_numpy_on_device_memory_says_what_to_type(runtime, compute) -> None:
    with pytest.raises(TypeError, match=r"cupy\.asarray\(buf\).*buf\.to_numpy\(\)"):
        compute(cumem.zeros(3))


def test_arguments_of_others_say_what_to_type(runtime) -> None:
    buffer, array = cumem.zeros(3), np.zeros(3)
    calls = {
        "copy_async": lambda: cumem.copy(buffer, array, non_blocking=True),  # type: ignore[call-arg]
        r"copy_async\(dst": lambda: cumem.asnumpy(buffer, blocking=False),  # type: ignore[call-arg]
        "empty_pinned": lambda: cumem.empty(3, pin_memory=True),  # type: ignore[call-arg]
        "unexpected keyword argument 'nonsense'$": lambda: cumem.copy(
            buffer,
            array,
            nonsense=1,  # type: ignore[call-arg]
        ),
    }
    for text, call in calls.items():
        with pytest.raises(TypeError, match=text):
            call()


CONSTRUCTORS: dict[str, tuple[Any, ...]] = {
    "array": ([1, 2],),
    "asarray": ([1, 2],),
    "empty": (3,),
    "empty_device": (3,),
    "empty_like": ([1, 2],),
    "empty_managed": (3,),
    "empty_mapped": (3,),
    "empty_pinned": (3,),
    "full": (3, 1),
    "full_like": ([1, 2], 1),
    "zeros": (3,),
    "zeros_like": ([1, 2],),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_constructor_says_what_to_type_for_arguments_of_others(
    emulated, name
) -> None:
    make: Any = getattr(cumem, name)
    given = CONSTRUCTORS[name]
    taken = inspect.signature(make).parameters
    for keyword, hint in hints.ARGUMENTS.items():
        if keyword in taken:
            continue
        with pytest.raises(TypeError) as caught:
            make(*given, **{keyword: True})
        text = f"{name}() got an unexpected keyword argument '{keyword}': {hint}"
        assert str(caught.value) == text
    with pytest.raises(TypeError, match=r"argument 'nonsense'$"):
        make(*given, nonsense=1)
    # Another mistake in the call has an error of its own.
    with pytest.raises(TypeError, match="missing"):
        make()
    with pytest.raises(TypeError, match="dtype"):
        make(*given, dtype=object)
    assert make(*given, "f4").dtype == np.dtype("f4")


NEEDED: dict[str, tuple[Any, ...]] = {
    "take_rows": (np.ones((2, 2)), [1]),
    "record": (),
    "Region": ("weights",),
    "chunks": (np.ones(3),),
    "pipeline": (lambda *_: None, np.ones(3)),
    "prefetch": ([np.ones(3)],),
    "load": ("x.npy",),
    "save": ("x.npy", np.ones(3)),
    "load_safetensors": ("x",),
    "fromfile": ("x",),
    "tofile": ("x", np.ones(3)),
    "to_device": (np.ones(3),),
    "to_host": (np.ones(3),),
    "copy": (np.ones(3), np.ones(3)),
    "configure": (),
    "Pool": ("pinned",),
    "set_limit": ("pinned",),
    "Event": (),
    "Stream": (),
    "prefetch_pages": ([],),
    "tiles": (1 << 20,),
    "reshape": (1, 1),
    "transpose": (1, 0),
}


@pytest.mark.parametrize("name", hints.ARGUMENTS_OF)
def test_every_function_says_what_to_type_for_arguments_of_others(
    emulated, name: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    buffer: Any = cumem.empty_pinned((1, 1))
    call: Any = getattr(cumem if hasattr(cumem, name) else buffer, name)
    for keyword, hint in hints.ARGUMENTS_OF[name].items():
        with pytest.raises(TypeError) as caught:
            call(*NEEDED[name], **{keyword: True})
        text = f"{name}() got an unexpected keyword argument '{keyword}': {hint}"
        assert str(caught.value) == text
    assert not list(tmp_path.iterdir())


#: These calls have more arguments than cumem takes. Other libraries would take them all.
TOO_MANY: dict[str, Callable[..., Any]] = {
    "empty": lambda: cumem.empty(2, 3, 4, 5),  # type: ignore[call-overload]
    "zeros": lambda: cumem.zeros(2, 3, 4, 5),  # type: ignore[call-overload]
    "empty_device": lambda: cumem.empty_device(2, 3, 4),  # type: ignore[call-arg]
    "empty_managed": lambda: cumem.empty_managed(2, 3, 4),  # type: ignore[call-arg]
    "empty_mapped": lambda: cumem.empty_mapped(2, 3, 4),  # type: ignore[call-arg]
    "empty_pinned": lambda: cumem.empty_pinned(2, 3, 4),  # type: ignore[call-arg]
    "Pool": lambda: cumem.Pool("pinned", "1 GB"),  # type: ignore[call-overload]
    "advise": lambda: cumem.empty_managed(1).advise("r"),  # type: ignore[call-arg]
    "copy_many": lambda: cumem.copy_many([], []),  # type: ignore[call-arg]
    "copy_many_async": lambda: cumem.copy_many_async([], []),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", hints.POSITIONAL)
def test_call_with_too_many_arguments_says_how_they_are_given(
    emulated, name: str
) -> None:
    with pytest.raises(TypeError) as caught:
        TOO_MANY[name]()
    assert str(caught.value).endswith(f" given): {hints.POSITIONAL[name]}")
    assert str(caught.value).startswith(f"{name}() takes ")


def test_order_by_position_says_that_it_is_given_by_name(emulated) -> None:
    with pytest.raises(TypeError, match="order= and the like are given by name"):
        cumem.empty((2, 3), "f4", "pinned", "F")  # type: ignore[call-overload]


@pytest.mark.parametrize("library", ["torch", "numba"])
def test_dtypes_of_others_say_which_one_of_numpy_to_type(emulated, library) -> None:
    class Dtype:
        """A dtype like those of the library, of which only the text says what it is."""

        __module__ = f"{library}.core.types"

        def __init__(self, name: str) -> None:
            self.name = name

        def __str__(self) -> str:
            return f"torch.{self.name}" if library == "torch" else self.name

    buffer: Any = cumem.zeros(4, kind="pinned")
    for name, hint in (
        ("float32", 'use "float32"'),
        ("bool", 'use "bool"'),
        ("bfloat16", "use ml_dtypes.bfloat16"),
        ("float8_e5m2", "use ml_dtypes.float8_e5m2"),
        ("quint8", "that NumPy does not have"),
    ):
        dtype: Any = Dtype(name)
        calls: dict[str, Callable[[], object]] = {
            **{
                each: functools.partial(getattr(cumem, each), *given, dtype=dtype)
                for each, given in CONSTRUCTORS.items()
            },
            "view": lambda: buffer.view(dtype),  # noqa: B023
            "astype": lambda: buffer.astype(dtype),  # noqa: B023
            "fromfile": lambda: cumem.fromfile(os.devnull, dtype),  # noqa: B023
            "chunks": lambda: cumem.chunks([buffer], dtype=dtype),  # noqa: B023
            "pipeline": lambda: cumem.pipeline(abs, buffer, dtype=dtype),  # noqa: B023
        }
        for each, call in calls.items():
            with pytest.raises(TypeError) as caught:
                call()
            assert f"is one of {library}" in str(caught.value), each
            assert str(caught.value).endswith(hint), each


def test_what_is_no_dtype_at_all_raises_numpys_error(emulated) -> None:
    for make in (cumem.empty, cumem.zeros, cumem.empty_pinned):
        with pytest.raises(TypeError, match=r"understood|interpret"):
            make(3, "nonsense")
        with pytest.raises(TypeError, match="interpret"):
            make(3, 3.5)  # type: ignore[arg-type]


# PyTorch warns once in a process, when a tensor of such a dtype is first made.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_of_torch_is_one_of_numpy_or_says_so(emulated) -> None:
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    named = 0
    for dtype in dtypes:
        with pytest.raises(TypeError, match=f"dtype {dtype} is one of torch") as caught:
            cumem.empty_pinned(3, dtype)
        found = re.search(r'use (?:"(\w+)"|ml_dtypes\.(\w+))$', str(caught.value))
        if found is None:
            continue
        theirs = torch.empty(3, dtype=dtype)
        ours = cumem.empty_pinned(3, found[1] or getattr(ml_dtypes, found[2]))
        assert ours.itemsize == theirs.element_size()
        if found[1]:
            assert theirs.numpy().dtype == ours.dtype
        named += 1
    assert named >= 12


def test_dtypes_of_jax_and_cupy_are_taken(emulated) -> None:
    """CuPy's dtypes are NumPy's own, and those of JAX have an attribute `dtype`."""
    jnp = pytest.importorskip("jax.numpy")
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64):
        for make in (cumem.empty, cumem.zeros):
            assert make(3, dtype).dtype == jnp.empty(3, dtype).dtype


def test_every_hint_of_an_argument_can_be_typed() -> None:
    """Each function that a hint names exists and takes the arguments in the hint."""
    seen = set()
    call = re.compile(r"(?:cumem\.|(?<![\w.]))(\w+)\(([^()]*)")
    texts = [*hints.ARGUMENTS.values()]
    for own in hints.ARGUMENTS_OF.values():
        texts += [text.replace("np.load(file, ", "(") for text in own.values()]
    for text in texts:
        for name, arguments in call.findall(text):
            taken = inspect.signature(getattr(cumem, name)).parameters
            assert {*re.findall(r"(\w+)=", arguments)} <= {*taken}, text
            seen.add(name)
    assert {"empty_pinned", "empty_managed", "copy_async", "asarray"} <= seen


def test_channels_last_is_had_as_its_hint_says(emulated) -> None:
    torch = pytest.importorskip("torch")
    assert (
        ".empty((n, h, w, c)).transpose(0, 3, 1, 2)" in hints.ARGUMENTS["memory_format"]
    )
    buffer = cumem.empty_pinned((2, 5, 7, 3)).transpose(0, 3, 1, 2)
    tensor = torch.from_dlpack(buffer)
    assert tensor.shape == (2, 3, 5, 7)
    assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_every_hint_of_a_member_can_be_typed(runtime) -> None:
    """Each call that a hint names exists."""
    buf = cumem.array([[1.0, 2.0]], kind="pinned")
    known: dict[str, object] = {"cumem": cumem, "buf": buf, "np": np, "stream": None}
    for text in hints.MEMBERS.values():
        for name in re.findall(r"cumem\.(\w+)\(", text):
            assert callable(getattr(cumem, name)), text
        for name in re.findall(r"\bbuf\.(\w+)", text):
            assert hasattr(buf, name), text
    for stated, cls in (
        (hints.STREAM_MEMBERS, cumem.Stream),
        (hints.EVENT_MEMBERS, cumem.Event),
        (hints.TRANSFER_MEMBERS, cumem.Transfer),
        (hints.POOL_MEMBERS, cumem.Pool),
    ):
        for text in stated.values():
            for name in re.findall(r"stats\(\)\.(\w+)", text):
                assert hasattr(cumem.stats()["device"], name), text
            for name in re.findall(
                r"\b(?:stream|event|end|transfer|pool)\.(\w+)", text
            ):
                assert hasattr(cls, name), text
    assert known


def test_functions_of_others_say_what_to_type() -> None:
    for name, hint in (hints.NAMES_OF_CUMEM | hints.FORMER_NAMES).items():
        # Another test may have imported the submodule `integrations`.
        if name != "integrations":
            assert not hasattr(cumem, name)
            assert name not in dir(cumem)
        for there in re.findall(r"cumem\.(\w+)\(", hint):
            assert callable(getattr(cumem, there)), hint
    with pytest.raises(AttributeError, match=r"'ones'; use cumem\.full\(shape, 1\)"):
        cumem.ones  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"attribute 'nonsense'$"):
        cumem.nonsense  # type: ignore[attr-defined]  # noqa: B018
