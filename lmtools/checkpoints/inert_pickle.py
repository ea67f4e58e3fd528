"""Reads a pickle as data. A pickle is a program for a stack machine; this is a machine that can build, but not run.

`pickle_names.py` says what each name in it stands for, and which are refused. Nothing that is found by name is ever
called but the functions there, and memory grows only as the pickle does.
Source: the opcodes' documentation in Python's `pickletools`, which also takes them apart here.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import IO, Any

import torch

from lmtools.checkpoints.lazy_tensor import Storage
from lmtools.checkpoints.pickle_names import Builder, ForeignClass, ForeignRecord, resolve
from lmtools.errors import CheckpointError

FindStorage = Callable[[torch.dtype, str, int], Storage]
"""Finds a storage by its type, its key and its number of elements."""


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
                stack.append(resolve(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(resolve(module, name))
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
        case Builder():
            return callee.build(*args)
        case ForeignClass():
            return ForeignRecord(callee, args)
    raise TypeError(f"a call of {type(callee).__name__}")
