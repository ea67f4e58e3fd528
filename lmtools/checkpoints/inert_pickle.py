"""Reads a pickle as data. A pickle is a program for a stack machine; this is a machine that can build, but not run.

It knows three kinds of names:

- what a checkpoint is made of (tensors, storages, types, sizes, dicts): built by the functions below;
- classes of the programs that wrote checkpoints (`argparse.Namespace`, fairseq's, omegaconf's, ...): an instance
  becomes a `ForeignRecord` that holds what the pickle says of it. Nothing of theirs is imported;
- everything else, `os.system` first of all: refused by name.

Nothing that is found by name is ever called but the functions below, and memory grows only as the pickle does.
Source: the opcodes' documentation in Python's `pickletools`, which also takes them apart here.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch

from lmtools.checkpoints.lazy_tensor import LazyTensor, Storage
from lmtools.errors import CheckpointError

FindStorage = Callable[[torch.dtype, str, int], Storage]
"""Finds a storage by its type, its key and its number of elements."""

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
class _Builder:
    """A function of ours, under the name that pickles call it by."""

    build: Callable[..., Any]


def read_pickle(stream: IO[bytes], find_storage: FindStorage | None = None) -> Any:
    """Read one pickle from where the stream stands; it stands behind it afterwards.

    Args:
        stream: has `read`, `readline` and `tell`.
        find_storage: None if storages must not occur.

    Returns:
        None, numbers, strings, bytes, lists, tuples, dicts and sets, with torch.dtype, LazyTensor, Storage,
        ForeignClass and ForeignRecord among them. They may share parts and contain themselves.

    Raises:
        CheckpointError: it asks for something that data never needs.
        Exception: of many kinds, if it is broken.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        start = marks.pop()
        if start > len(stack):
            raise IndexError("a mark above the stack")
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any  # of the opcode, decoded
    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(memo[argument])
            case "BININT" | "BININT1" | "BININT2" | "INT" | "LONG" | "LONG1" | "LONG4" | "BINFLOAT" | "FLOAT":
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8" | "UNICODE":
                stack.append(argument)
            case "BINSTRING" | "SHORT_BINSTRING" | "STRING":
                stack.append(argument)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "MARK":
                marks.append(len(stack))
            case "POP_MARK":
                pop_to_mark()
            case "POP":
                stack.pop()
            case "DUP":
                stack.append(stack[-1])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [stack.pop() for _ in range(int(opcode.name[-1]))]
                stack.append(tuple(reversed(items)))
            case "TUPLE":
                stack.append(tuple(pop_to_mark()))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                stack.append(pop_to_mark())
            case "APPEND":
                value = stack.pop()
                _extend(stack[-1], [value])
            case "APPENDS":
                values = pop_to_mark()
                _extend(stack[-1], values)
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                values = pop_to_mark()
                stack.append({})
                _update(stack[-1], values)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _update(stack[-1], [key, value])
            case "SETITEMS":
                values = pop_to_mark()
                _update(stack[-1], values)
            case "EMPTY_SET":
                stack.append(set())
            case "ADDITEMS":
                values = pop_to_mark()
                _add(stack[-1], values)
            case "FROZENSET":
                stack.append(frozenset(map(_hashable, pop_to_mark())))
            case "GLOBAL":
                stack.append(_resolve(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_resolve(module, name))
            case "REDUCE" | "NEWOBJ":
                args, callee = stack.pop(), stack.pop()
                stack.append(_construct(callee, args))
            case "BUILD":
                state = stack.pop()
                _set_state(stack[-1], state)
            case "BINPERSID":
                stack.append(_persistent(stack.pop(), find_storage))
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case _:
                raise CheckpointError(f"uses the pickle opcode {opcode.name}, which data never needs; refused")
    raise EOFError("the pickle does not end")


# What opcodes do -----------------------------------------------------------------------------------------------------


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, ForeignRecord):
        target = target.items
    if not isinstance(target, list):
        raise TypeError(f"items for {type(target).__name__}")
    target.extend(values)


def _update(target: Any, keys_and_values: list[Any]) -> None:
    pairs = list(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))
    if isinstance(target, ForeignRecord):
        target.items.extend(pairs)
    elif isinstance(target, dict):
        target.update((_hashable(key), value) for key, value in pairs)
    else:
        raise TypeError(f"keys for {type(target).__name__}")


def _add(target: Any, values: list[Any]) -> None:
    if not isinstance(target, set):
        raise TypeError(f"members for {type(target).__name__}")
    target.update(map(_hashable, values))


def _hashable(key: Any) -> Any:
    """A key that costs nothing: tuples that share their parts take for ever to hash, and long numbers collide."""
    if not isinstance(key, (str, bytes, int, float, type(None))):
        raise TypeError(f"a key of type {type(key).__name__}")
    if isinstance(key, int) and key.bit_length() > 64:
        raise TypeError("a number of more than 64 bits as a key")
    return key


def _persistent(pid: Any, find_storage: FindStorage | None) -> Storage:
    """`("storage", dtype, key, device, num_elements)`; legacy files have a view after that, None since 2017."""
    if find_storage is None or type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise TypeError("a reference to something that is no storage")
    _, dtype, key, _, num_elements, *view = pid
    if view not in ([], [None]):
        raise TypeError("a view of a storage")
    if not (isinstance(dtype, torch.dtype) and type(key) is str and type(num_elements) is int and num_elements >= 0):
        raise TypeError("a storage without type, key or size")
    return find_storage(dtype, key, num_elements)


def _set_state(target: Any, state: Any) -> None:
    if isinstance(target, ForeignRecord):
        target.state = state
    elif not isinstance(target, dict):  # of an OrderedDict: attributes, such as a state dict's `_metadata`
        raise TypeError(f"a state for {type(target).__name__}")


def _construct(callee: Any, args: Any) -> Any:
    if type(args) is not tuple:
        raise TypeError("arguments that are no tuple")
    match callee:
        case _Builder():
            return callee.build(*args)
        case ForeignClass():
            return ForeignRecord(callee, args)
    raise TypeError(f"a call of {type(callee).__name__}")


def _resolve(module: Any, name: Any) -> ForeignClass | _Builder | torch.dtype:
    if type(module) is not str or type(name) is not str or len(module) + len(name) > _MAX_NAME_LETTERS:
        raise TypeError(f"a name that is no string of at most {_MAX_NAME_LETTERS} letters")
    if (builder := _BUILDERS.get((module, name))) is not None:
        return _Builder(builder)
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
        *((module, name) for module in ("builtins", "__builtin__") for name in _BUILTIN_TYPES),
        *(("typing", name) for name in ("Any", "Dict", "List", "Optional", "Tuple", "Union")),  # what omegaconf notes
    )
)
"""Names of data in packages that have more than data; not worth building."""
