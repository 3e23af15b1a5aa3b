"""Tensors on disk, as numpy arrays and for torch, without copies."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import numpy as np
import numpy.typing as npt

from . import _core
from ._errors import RequestError

_NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}
_NAMES = {np.dtype(kind): name for name, kind in _NUMPY.items()}


class Tensor:
    """A tensor as it is stored. ``numpy()`` and ``torch.from_dlpack(tensor)`` share its memory.

    The memory is the file's, mapped privately: what is written to it stays in this process. (A file that
    somebody cuts short while it is mapped ends the process that reads it; ``copy()`` is safe from then on.)
    """

    def __init__(self, name: str, dtype: str, shape: List[int], raw: npt.NDArray[np.uint8]) -> None:
        self.name = name
        self.dtype = dtype
        self.shape: Tuple[int, ...] = tuple(shape)
        self._raw = raw

    @property
    def nbytes(self) -> int:
        return int(self._raw.nbytes)

    def raw(self) -> npt.NDArray[np.uint8]:
        """Its bytes, little-endian, row-major."""
        return self._raw

    def numpy(self) -> npt.NDArray[Any]:
        """The same memory as a numpy array; TypeError for types that numpy has not (BF16, 8-bit floats)."""
        if self.dtype not in _NUMPY:
            raise TypeError(
                f"{self.name}: numpy has no {self.dtype}; legal: float32(), which copies, torch.from_dlpack, raw()"
            )
        return self._raw.view(_NUMPY[self.dtype]).reshape(self.shape)

    def float32(self) -> npt.NDArray[np.float32]:
        """As numbers of 32 bits: shared where it is F32, else a copy."""
        if self.dtype == "BF16":  # the upper half of a float32
            wide = self._raw.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return self.numpy().astype(np.float32, copy=False)

    def copy(self) -> "Tensor":
        return Tensor(self.name, self.dtype, list(self.shape), self._raw.copy())

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> npt.NDArray[Any]:
        array = self.float32() if self.dtype == "BF16" else self.numpy()
        if copy is False and (self.dtype == "BF16" or (dtype is not None and array.dtype != dtype)):
            raise ValueError(f"{self.name}: cannot be had without a copy")
        return np.array(array, dtype=dtype, copy=True) if copy or dtype is not None else array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._view().__dlpack__(**arguments)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (1, 0)  # the host's memory

    def _view(self) -> Any:
        return _core._viewed(self._raw, self.dtype, list(self.shape))

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.dtype} {self.shape}>"


def _text_of(path: Union[str, bytes, "os.PathLike[Any]"]) -> str:
    text = os.fsdecode(path)
    if "\0" in text:
        raise RequestError("--path: it has a character of code 0")
    return text


def _at(place: Any) -> Tensor:
    return Tensor(place.name, place.dtype, place.shape, place.raw)


class Tensors(Mapping[str, npt.NDArray[Any]]):
    """Named tensors: ``tensors[name]`` is a numpy array, ``tensors.tensor(name)`` the tensor as it is stored.

    Arrays are views of the mapped files where numpy has the type; BF16 is widened to float32, which copies.
    """

    def __init__(self, places: List[Any]) -> None:
        self._places = {place.name: place for place in places}

    def tensor(self, name: str) -> Tensor:
        return _at(self._places[name])

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        tensor = self.tensor(name)
        return tensor.float32() if tensor.dtype == "BF16" else tensor.numpy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Checkpoint(Tensors):
    """A checkpoint of a training: its tensors by their logical names, whatever mesh saved it.

    A tensor that one rank wrote whole is a view of the file. One that ranks wrote in parts is put together in
    memory, and checked against its checksums.
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"]) -> None:
        self._stored = _core._Stored(_text_of(path))
        self._names = list(self._stored.names)
        super().__init__([])

    path: str = property(lambda self: self._stored.path)  # type: ignore[assignment]
    step: int = property(lambda self: self._stored.step)  # type: ignore[assignment]
    seed: int = property(lambda self: self._stored.seed)  # type: ignore[assignment]
    tokens: int = property(lambda self: self._stored.tokens)  # type: ignore[assignment]
    dtype: str = property(lambda self: self._stored.dtype)  # type: ignore[assignment]
    model: "_core.Model" = property(lambda self: self._stored.model)  # type: ignore[assignment]

    def tensor(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        place = self._stored.place(name)
        return self.read(name) if place is None else _at(place)

    def read(self, name: str) -> Tensor:
        """A copy in memory, checked against the checkpoint's checksums: RequestError where it is damaged."""
        if name not in self._names:
            raise KeyError(name)
        raw = np.frombuffer(self._stored.read(name), dtype=np.uint8)
        return Tensor(name, self._stored.dtype_of(name), self._stored.shape_of(name), raw)

    def verify(self) -> Dict[str, int]:
        """Reads every byte: how many tensors, parts, files and bytes there are. RequestError where one is damaged."""
        return _core._check_checkpoint(self.path)

    def diff(self, other: Union["Checkpoint", str, "os.PathLike[str]"]) -> Dict[str, float]:
        """The tensors that differ, each with max |a - b| / max |a|; empty: the same, to the last bit."""
        path = other.path if isinstance(other, Checkpoint) else _text_of(other)
        return _core._diff_checkpoints(self.path, path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: step {self.step} of {self.model.name}>"


# What is there decides the type: a Checkpoint, or what has less. With Any in the union, types are checked as of a
# Checkpoint, and nobody has to ask which it is.
def open_checkpoint(path: Union[str, "os.PathLike[str]"]) -> Union[Checkpoint, Any]:
    """Opens a checkpoint, a directory of checkpoints (the last is used), a directory in Hugging Face's layout, or
    one safetensors file. RequestError where there is none, or a header is damaged."""
    where = _text_of(path)
    if os.path.isdir(where):
        if _core._holds_checkpoint(where):
            return Checkpoint(where)
        files = sorted(name for name in os.listdir(where) if name.endswith(".safetensors"))
        if not files:
            return Checkpoint(where)  # which says what is missing
        return Tensors([place for name in files for place in _core._places_in(os.path.join(where, name))])
    return Tensors(_core._places_in(where))


def save_safetensors(
    path: Union[str, "os.PathLike[str]"],
    tensors: Mapping[str, Any],
    metadata: Optional[Mapping[str, str]] = None,
) -> None:
    """Writes arrays to a safetensors file, which is there whole or not at all. Values are numpy arrays, or Tensors
    of any type. RequestError for a type that the format has not, RunError where the disk is full."""
    for field, given in (("tensors", tensors), ("metadata", metadata or {})):
        for name in given:
            if not isinstance(name, str):
                raise RequestError(f"--{field}: a name of type {type(name).__name__}; legal: a text")
    for value in (metadata or {}).values():
        if not isinstance(value, str):
            raise RequestError(f"--metadata: a value of type {type(value).__name__}; legal: a text")
    stored: List[Tuple[str, str, List[int], npt.NDArray[np.uint8]]] = []
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            stored.append((name, value.dtype, list(value.shape), value.raw()))
            continue
        array = np.asarray(value)
        shape = list(array.shape)
        array = np.ascontiguousarray(array)
        if array.dtype not in _NAMES:
            raise RequestError(f"--dtype {array.dtype}: of {name}; legal: {', '.join(map(str, _NAMES))}")
        stored.append((name, _NAMES[array.dtype], shape, array.reshape(-1).view(np.uint8)))
    _core._write_safetensors(_text_of(path), stored, dict(metadata or {}))
