# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch from and to safetensors files.

The tests load and save the same files with cumem and with the package safetensors, and
compare them bit by bit. Tensors have random bits of every element type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import session
from test_safetensors_format import blob, tensor

import cumem
from cumem.files.safetensors import format as form

torch = pytest.importorskip("torch")
oracle = pytest.importorskip("safetensors.torch")

KINDS = ["device", "pinned", "mapped", "managed", "host"]


def known() -> dict[str, Any]:
    """Return the element types of the format that this PyTorch has."""
    return {
        name: getattr(torch, element.torch)
        for name, element in form.TYPES.items()
        if element.torch and hasattr(torch, element.torch)
    }


def octets(t: Any) -> bytes:
    """Return the bits of a tensor.

    Tests compare these, because NaNs are never equal, and PyTorch cannot compare tensors of
    every dtype.
    """
    t = t.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return bytes(t.view(torch.uint8).tolist())


def some_tensors() -> dict[str, Any]:
    """Return tensors with random bits of every type, some of them with unusual shapes."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, dtype in known().items():
        bits = torch.randint(0, 2, (3, 4 * 8), generator=generator, dtype=torch.uint8)
        if name != "BOOL":
            bits = torch.randint(0, 256, bits.shape, generator=generator).to(
                torch.uint8
            )
        made[name] = bits.view(dtype)
        made[name + " empty"] = bits[:0].view(dtype)
        made[name + " none"] = torch.empty((2, 0, 3), dtype=dtype)
        if name != "F4":
            made[name + " scalar"] = bits.view(dtype)[0, 0].clone()
    return made


def equal(loaded: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that the loaded tensors have the wanted names, dtypes, shapes and bytes."""
    assert loaded.keys() == wanted.keys()
    for name, t in wanted.items():
        assert loaded[name].dtype is t.dtype, name
        assert loaded[name].shape == t.shape, name
        assert octets(loaded[name]) == octets(t), name


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_equal_those_of_the_reference_loader(runtime, kind, tmp_path) -> None:
    path = tmp_path / "t.safetensors"
    oracle.save_file(some_tensors(), path)
    loaded = cumem.load_safetensors(path, kind=kind, framework="torch")
    equal(loaded, oracle.load_file(path))
    on_gpu = not runtime.emulated and kind in ("device", "managed")
    for t in loaded.values():
        assert t.device.type == ("cuda" if on_gpu else "cpu")
        assert t.is_contiguous()


def test_tensors_share_the_memory_of_cumem_and_keep_it(runtime, tmp_path) -> None:
    path = tmp_path / "t.safetensors"
    oracle.save_file({"w": torch.ones(1000), "v": torch.ones(10).bfloat16()}, path)
    loaded = cumem.load_safetensors(path, kind="pinned", framework="torch")
    assert session.testing.live_storages() == 2
    w = loaded["w"]
    loaded.clear()
    assert session.testing.live_storages() == 1
    w += 1
    assert w.sum() == 2000
    assert cumem.asbuffer(w).kind == "pinned"
    del w
    assert session.leftovers() == {}


@pytest.mark.gpu
def test_tensors_are_on_the_device_of_the_call(cuda, tmp_path) -> None:
    path = tmp_path / "t.safetensors"
    oracle.save_file(some_tensors(), path)
    last = cumem.device_count() - 1
    loaded = cumem.load_safetensors(path, device=last, framework="torch")
    assert {t.device for t in loaded.values()} == {torch.device("cuda", last)}
    equal(loaded, oracle.load_file(path))
    pinned = cumem.load_safetensors(path, kind="pinned", framework="torch")
    assert pinned["F32"].is_pinned()


def test_types_that_torch_lacks_come_as_bytes(runtime, tmp_path, monkeypatch) -> None:
    header = {
        "six": tensor("F6_E2M3", [2, 4], [0, 6]),
        "odd": tensor("F4", [2, 3], [6, 9]),
        "late": tensor("F8_E8M0", [3], [9, 12]),
    }
    path = tmp_path / "t.safetensors"
    path.write_bytes(blob(header, bytes(range(12))))
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)
    loaded = cumem.load_safetensors(path, framework="torch")
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in loaded.items()}
    assert shapes["six"] == (torch.uint8, (2, 3))
    assert shapes["late"] == (torch.uint8, (3,))
    assert shapes["odd"][1] == (3,)
    assert b"".join(octets(t) for t in loaded.values()) == bytes(range(12))


def test_tensors_are_saved_as_the_reference_implementation_does(
    runtime, tmp_path
) -> None:
    tensors = some_tensors()
    cumem.save_safetensors(tmp_path / "ours", tensors, {"format": "pt"})
    oracle.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_of_any_layout_are_saved(runtime, tmp_path) -> None:
    table = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "turned": table.T,
        "part": table[1:3, ::2].bfloat16(),
        "strided": table.bfloat16()[:, ::2],
        "parameter": torch.nn.Parameter(table),
        "result": table.clone().requires_grad_() * 2,
        "conjugate": torch.view_as_complex(table.reshape(4, 3, 2)).conj(),
        "expanded": table[0].expand(3, 6),
        "tied": table,
    }
    if not runtime.emulated:
        tensors |= {f"{name} on it": t.cuda() for name, t in tensors.items()}
    path = cumem.save_safetensors(tmp_path / "t", tensors)
    equal(oracle.load_file(path), tensors)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(2, dtype=torch.complex128), "complex128"),
        (lambda: torch.zeros(2, device="meta"), "not a dense tensor.*meta"),
        (lambda: torch.eye(2).to_sparse(), "not a dense tensor.*sparse"),
    ],
)
def test_tensors_that_cannot_be_saved_are_refused(
    emulated, tmp_path: Path, make, why
) -> None:
    with pytest.raises(TypeError, match=why) as caught:
        cumem.save_safetensors(tmp_path / "t", {"w": make()})
    assert caught.value.__notes__ == ["while saving the tensor 'w'"]
    assert list(tmp_path.iterdir()) == []


def test_models_take_what_was_loaded(runtime, tmp_path) -> None:
    model = torch.nn.Linear(5, 3)
    path = cumem.save_safetensors(tmp_path, model.state_dict())
    other = torch.nn.Linear(5, 3)
    loaded = cumem.load_safetensors(path, framework="torch")
    other.load_state_dict(loaded, assign=True)
    x = torch.ones(5, device=loaded["weight"].device)
    loss = other(x).sum()
    loss.backward()
    assert other.weight.grad is not None
    assert torch.equal(other(x).cpu(), model(torch.ones(5))) or not runtime.emulated
