"""What the names in a pickle stand for: parts of a checkpoint, inert records of foreign classes, or a refusal.

Three kinds of names:

- what a checkpoint is made of (tensors, storages, types, sizes, dicts): built by the functions below;
- classes of the programs that wrote checkpoints (`argparse.Namespace`, fairseq's, omegaconf's, ...): an instance
  becomes a `ForeignRecord` that holds what the pickle says of it. Nothing of theirs is imported;
- everything else, `os.system` first of all: refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lmtools.checkpoints.lazy_tensor import LazyTensor, Storage
from lmtools.errors import CheckpointError

_FOREIGN_PACKAGES = frozenset(
    (
        "apex",
        "argparse",
        "enum",
        "fairscale",
        "fairseq",
        "fairseq_cli",
        "hydra",
        "megatron",
        "omegaconf",
        "sacremoses",
        "tokenizers",
        "transformers",
    )
)

_MAX_NAME_LETTERS = 300

_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORAGE_DTYPES.values()}


@dataclass(frozen=True)
class ForeignClass:
    """The name of a class or function that is not here."""

    module: str
    name: str


@dataclass(eq=False, repr=False)
class ForeignRecord:
    """What a pickle says of an instance of a foreign class. Inert.

    Attributes:
        type: the class.
        args: what its constructor would have got.
        state: what its attributes would have become.
        items: what would have been appended to it, or (key, value) put into it.
    """

    type: ForeignClass
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.type.module}.{self.type.name}>"


@dataclass(frozen=True)
class Builder:
    """A function of ours, under the name that pickles call it by."""

    build: Callable[..., Any]


def resolve(module: Any, name: Any) -> ForeignClass | Builder | torch.dtype:
    """What a name stands for.

    Raises:
        CheckpointError: it is of the third kind.
        TypeError: it is no name.
    """
    if type(module) is not str or type(name) is not str or len(module) + len(name) > _MAX_NAME_LETTERS:
        raise TypeError(f"a name that is no string of at most {_MAX_NAME_LETTERS} letters")
    if (builder := _BUILDERS.get((module, name))) is not None:
        return Builder(builder)
    if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
        return _STORAGE_DTYPES[name]
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name]
    if (module, name) in _FOREIGN_NAMES or module.partition(".")[0] in _FOREIGN_PACKAGES:
        return ForeignClass(module, name)
    raise CheckpointError(f"names {f'{module}.{name}'!r}, which is no data; the file is refused, nothing of it was run")


# What names stand for: never more than what the arguments already hold -----------------------------------------------


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, _gradient: Any = None, _hooks: Any = None, _metadata: Any = None
) -> LazyTensor:
    """torch._utils._rebuild_tensor(_v2): what follows the stride is not data."""
    return LazyTensor(_storage(storage).dtype, size, stride, offset, storage)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _gradient: Any, _hooks: Any, dtype: Any
) -> LazyTensor:
    """torch._utils._rebuild_tensor_v3: a view of an untyped storage."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor of no type")
    return LazyTensor(dtype, size, stride, offset, _storage(storage))


def _storage(value: Any) -> Storage:
    if not isinstance(value, Storage):
        raise TypeError("a tensor without a storage")
    return value


def _parameter(data: Any, _gradient: Any, _hooks: Any, _state: Any = None) -> Any:
    """torch._utils._rebuild_parameter: the tensor is all that matters of it."""
    return data


def _size(sizes: Any) -> tuple[Any, ...]:
    """torch.Size."""
    if type(sizes) is not tuple:
        raise TypeError("a size that is no tuple")
    return sizes


def _dict(_factory: Any = None) -> dict[Any, Any]:
    """collections.OrderedDict or defaultdict: the items come later."""
    return {}


def _counter(counts: Any = None) -> dict[Any, Any]:
    """collections.Counter, which is given its counts at once."""
    if not isinstance(counts, dict | None):
        raise TypeError("a Counter of no dict")
    return {} if counts is None else counts


def _instance(cls: Any, _base: Any, _state: Any) -> ForeignRecord:
    """copyreg._reconstructor, with which protocols below 2 begin an instance."""
    if not isinstance(cls, ForeignClass):
        raise TypeError("an instance of no class")
    return ForeignRecord(cls)


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    """A NumPy number, as checkpoints hold for a loss."""
    if isinstance(data, ForeignRecord) and data.type == _ENCODE:  # protocol 2 has no bytes
        data = data.args[0].encode("latin1")
    if not (isinstance(dtype, ForeignRecord) and dtype.type == ForeignClass("numpy", "dtype")):
        raise TypeError("a NumPy scalar of no type")
    if dtype.args[0] not in _NUMPY_NUMBERS or not isinstance(data, bytes):
        raise TypeError("a NumPy scalar that is no number")
    order = dtype.state[1] if isinstance(dtype.state, tuple) else "<"
    (value,) = np.frombuffer(data, dtype=f"{'>' if order == '>' else '<'}{dtype.args[0]}")
    return value.item()


_NUMPY_NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_ENCODE = ForeignClass("_codecs", "encode")

_BUILDERS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _dict,
    ("collections", "defaultdict"): _dict,
    ("collections", "Counter"): _counter,
    ("copyreg", "_reconstructor"): _instance,
    ("copy_reg", "_reconstructor"): _instance,
    ("numpy.core.multiarray", "scalar"): _numpy_scalar,
    ("numpy._core.multiarray", "scalar"): _numpy_scalar,
}

_BUILTIN_TYPES = (
    *("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "set", "str"),
    *("long", "unicode"),  # protocol 2 spells int and str as Python 2 did
)

_FOREIGN_NAMES = frozenset(
    (
        (_ENCODE.module, _ENCODE.name),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("torch", "device"),
        ("re", "_compile"),  # a pattern, as transformers' word tokenizers hold
        ("data_utils", "Corpus"),  # of the original Transformer-XL, whose modules have no package
        ("utils.vocabulary", "Vocab"),
        *((module, name) for module in ("builtins", "__builtin__") for name in _BUILTIN_TYPES),
        *(("typing", name) for name in ("Any", "Dict", "List", "Optional", "Tuple", "Union")),  # what omegaconf notes
    )
)
"""Names of data in packages that have more than data; not worth building."""
