"""A pickle is read as data: what Python's pickle would run is refused by name, and none costs more than its size."""

from __future__ import annotations

import enum
import functools
import importlib
import io
import operator
import os
import pickle
import subprocess
import sys
import tracemalloc
import types
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmtools.checkpoints.inert_pickle import read_pickle
from lmtools.checkpoints.pickle_names import ForeignClass, ForeignRecord
from lmtools.checkpoints.unpickle import plain, read_torch_file
from lmtools.errors import CheckpointError
from tests.support.torch_files import MAGIC, NO_STORAGES, PROTOCOL, SYSTEM, write_legacy, write_zip


def read(content: bytes) -> Any:
    return read_pickle(io.BytesIO(content))


def number(value: int) -> bytes:
    """The part of a pickle that makes a number."""
    return pickle.dumps(value, 2)[2:-1]


# Programs ------------------------------------------------------------------------------------------------------------


class Call:
    """Pickles as a call, which unpickling runs; can be what is called, too."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __call__(self) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


class StateSetter:
    """Pickles with a function of its own choice for setting the state."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path, (self.canary,), "x", None, None, Path.write_text


def code(canary: str) -> str:
    return f"__import__('pathlib').Path({canary!r}).touch()"


def command(canary: str) -> str:
    return f"touch '{canary}'"


PROGRAMS: dict[str, tuple[Callable[[str], Any], str]] = {
    "a command": (lambda canary: Call(os.system, command(canary)), "system"),
    "a process": (lambda canary: Call(subprocess.check_call, ["touch", canary]), "check_call"),
    "eval": (lambda canary: Call(eval, code(canary)), "eval"),
    "exec": (lambda canary: Call(exec, code(canary)), "exec"),
    "a code object": (lambda canary: Call(eval, Call(compile, code(canary), "x", "eval")), "eval"),
    "a method": (lambda canary: Call(Call(getattr, Path, "touch"), Path(canary)), "getattr"),
    "an import": (lambda canary: Call(Call(getattr, Call(__import__, "os"), "system"), command(canary)), "getattr"),
    "an imported module": (
        lambda canary: Call(Call(getattr, Call(importlib.import_module, "os"), "system"), command(canary)),
        "getattr",
    ),
    "a partial function": (lambda canary: Call(Call(functools.partial, os.system, command(canary))), "partial"),
    "an operator": (lambda canary: Call(Call(operator.methodcaller, "touch"), Path(canary)), "methodcaller"),
    "a map": (lambda canary: Call(list, Call(map, os.system, [command(canary)])), "map"),
    "torch's own functions": (lambda canary: Call(torch.save, {}, canary), "torch.serialization.save"),
    "NumPy's own functions": (lambda canary: Call(np.savetxt, canary, [1.0]), "numpy.savetxt"),
    "a setter of state": (StateSetter, ""),
    "deep inside": (lambda canary: {"model": [{"a": (1, Call(os.system, command(canary)))}]}, "system"),
}


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that is there once a program was run."""
    return tmp_path / "canary"


@pytest.mark.parametrize("write", [write_zip, write_legacy])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_refused_by_name_and_not_run(tmp_path, canary, program, protocol, write):
    make, name = PROGRAMS[program]
    content = pickle.dumps(make(str(canary)), protocol)
    path = write(tmp_path / "model.pt", content)
    with pytest.raises(CheckpointError, match=rf"{path}: names '.*{name}', which is no data; .* nothing of it was run"):
        read_torch_file(path)
    assert not canary.exists()
    pickle.loads(content)
    assert canary.exists(), "the test's program does nothing"


@pytest.mark.parametrize("place", range(5))
def test_a_program_in_any_pickle_of_a_legacy_file_is_refused(tmp_path, canary, place):
    pickles = [MAGIC, PROTOCOL, SYSTEM, pickle.dumps({}, 2), NO_STORAGES]
    pickles[place] = pickle.dumps(Call(os.system, command(str(canary))), 2)
    path = tmp_path / "model.pt"
    path.write_bytes(b"".join(pickles))
    with pytest.raises(CheckpointError, match="system', which is no data"):
        read_torch_file(path)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"(S'true'\nios\nsystem\n.", "opcode INST"),
        (b"(cos\nsystem\nS'true'\no.", "os.system"),
        (b"(cargparse\nNamespace\nS'true'\no.", "opcode OBJ"),
        (b"\x80\x04cargparse\nNamespace\n)}\x92.", "opcode NEWOBJ_EX"),
        (b"\x82\x01.", "opcode EXT1"),
        (b"\x83\x01\x00.", "opcode EXT2"),
        (b"\x84\x01\x00\x00\x00.", "opcode EXT4"),
        (b"P0\n.", "opcode PERSID"),
        (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
    ],
)
def test_other_ways_to_call_are_refused(content, reason):
    with pytest.raises(CheckpointError, match=reason):
        read(content)


@pytest.mark.parametrize(
    "content",
    [
        b"ctorch\nFloatStorage\n)R.",  # a type
        b"ctorch\nFloatStorage\n)\x81.",
        b"cargparse\nNamespace\n)R)R.",  # a record
        b"X\x01\x00\x00\x00x)R.",
        b"cargparse\nNamespace\nNR.",  # no arguments
        b"ccollections\nOrderedDict\n}R.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR.",  # a tensor of no storage
        b"ccopyreg\n_reconstructor\n(X\x01\x00\x00\x00xNNtR.",
        b"]}b.",  # a state for a list
        b"}Na.",  # an item for a dict
        b"](NNu.",
        b"(\x00e.",
        b"N(0t.",  # a mark above the stack
        b"cfairseq." + b"a" * 400 + b"\nOptions\n.",  # a name that none has
        b"}" + number(1 << 64) + b"Ns.",  # a key that can be made to collide
        b"})Ns.",  # a key that can take for ever to hash
        b"NQ.",  # a reference, where there are none
    ],
)
def test_nonsense_is_an_error(tmp_path, content):
    path = write_legacy(tmp_path / "model.pt", content)
    with pytest.raises(CheckpointError, match=rf"{path}: broken, or not a file of torch\.save"):
        read_torch_file(path)


def test_nothing_of_a_foreign_class_runs(monkeypatch, tmp_path):
    """Neither its module's import, nor construction, nor state: though it is of a package that checkpoints name."""
    ran: list[str] = []

    class Meta(type):
        def __call__(cls, *args: Any) -> Any:
            ran.append("metaclass")
            return super().__call__(*args)

    class Options(metaclass=Meta):
        def __new__(cls, *args: Any) -> Options:
            ran.append("__new__")
            return super().__new__(cls)

        def __setstate__(self, state: Any) -> None:
            ran.append("__setstate__")

        def __reduce__(self) -> tuple[Any, ...]:
            return Options, (1, "a"), {"lr": 0.5}

    Options.__module__, Options.__qualname__ = "fairseq.options", "Options"
    for name in ("fairseq", "fairseq.options"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fairseq.options"].Options = Options  # type: ignore[attr-defined]
    content = pickle.dumps(Options(), 2)
    ran.clear()
    pickle.loads(content)
    assert ran == ["metaclass", "__new__", "__setstate__"]

    ran.clear()
    monkeypatch.setitem(sys.modules, "fairseq.options", None)  # importing it now raises
    record = read_torch_file(write_zip(tmp_path / "model.pt", content)).content
    assert ran == []
    assert record.type == ForeignClass("fairseq.options", "Options")
    assert (record.args, record.state) == ((1, "a"), {"lr": 0.5})


def test_a_path_through_a_known_module_leads_nowhere(tmp_path, canary):
    """`argparse` has imported `os` under a name of its own."""
    content = b"\x80\x04\x8c\x08argparse\x8c\x0a_os.system\x93"
    content += b"X" + len(command(str(canary))).to_bytes(4, "little") + command(str(canary)).encode() + b"\x85R."
    record = read(content)
    assert not canary.exists()
    assert isinstance(record, ForeignRecord)
    pickle.loads(content)
    assert canary.exists()


# Data ----------------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers(-(2**63), 2**63 - 1) | st.none() | st.floats(allow_nan=False)
data = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=30
)


@given(data, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_comes_back(value, protocol):
    assert read(pickle.dumps(value, protocol)) == value


@given(st.sets(keys) | st.frozensets(keys) | st.binary(), st.sampled_from([4, 5]))
def test_sets_and_bytes_come_back(value, protocol):
    assert read(pickle.dumps(value, protocol)) == value


def test_keys_of_64_bits():
    numbers = {-(2**63): 1, 2**63 - 1: 2, 2**64 - 1: 3}
    assert read(pickle.dumps(numbers, 2)) == numbers


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_shared_stays_shared_and_cycles_stay_cycles(protocol):
    shared = [1]
    cycle: list[Any] = [shared, shared]
    cycle.append(cycle)
    ours = read(pickle.dumps(cycle, protocol))
    assert ours[0] is ours[1]
    assert ours[2] is ours


class Color(enum.Enum):
    RED = "red"


Color.__module__ = "fairseq.colors"


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_options_become_plain(monkeypatch, protocol):
    for name in ("fairseq", "fairseq.colors"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fairseq.colors"].Color = Color  # type: ignore[attr-defined]
    options = Namespace(lr=[0.25], arch="lm", inner=Namespace(a=(1, None)), color=Color.RED, types={"x"})
    expected = {"lr": [0.25], "arch": "lm", "inner": {"a": [1, None]}, "color": "red", "types": ["x"]}
    record = read(pickle.dumps(options, protocol))
    assert record.type == ForeignClass("argparse", "Namespace")
    assert plain(record) == expected


def test_a_configuration_of_omegaconf_becomes_plain():
    """The file was written by torch.save of a DictConfig of omegaconf 2.3.1, as fairseq 0.10 put into checkpoints."""
    content = read_torch_file(Path(__file__).with_name("dict_config.pt")).content
    assert plain(content["cfg"]) == {
        "model": {"_name": "transformer_lm", "decoder_layers": 2, "dropout": 0.1, "x": None},
        "list": [1, "a", {"k": True}],
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u8", "?"])
def test_numpy_numbers_become_numbers(dtype, protocol):
    value = np.array([1], dtype)[0]
    ours = read(pickle.dumps({"loss": value}, protocol))["loss"]
    assert (ours, type(ours)) == (value.item(), type(value.item()))


def test_numpy_numbers_of_a_big_endian_machine():
    content = pickle.dumps(np.float64(1.5), 3)
    little, big = np.array(1.5, "<f8").tobytes(), np.array(1.5, ">f8").tobytes()
    assert content.count(b"<") == content.count(little) == 1
    assert read(content.replace(b"<", b">").replace(little, big)) == 1.5


@pytest.mark.parametrize("protocol", [2, 4])
def test_dicts_with_more_to_them_become_dicts(protocol):
    state = OrderedDict(a=1)
    state._metadata = {"version": 1}  # type: ignore[attr-defined]  # as every state dict of torch has
    assert read(pickle.dumps({"model": state, "stats": defaultdict(list, b=[2])}, protocol)) == {
        "model": {"a": 1},
        "stats": {"b": [2]},
    }


def test_reading_stops_where_the_pickle_does():
    stream = io.BytesIO(pickle.dumps([1], 2) + b"rest")
    assert read_pickle(stream) == [1]
    assert stream.read() == b"rest"


# Crafted to be endless -----------------------------------------------------------------------------------------------


def doubled(depth: int, first: int) -> bytes:
    """A list of two of a list of two of ...; 2 ** depth lists, for whoever follows them."""
    steps = (b"](h%ch%ceq%c" % (first + i, first + i, first + i + 1) for i in range(depth))
    return b"]q%c" % first + b"".join(steps)


TEXT = b"X\x40\x42\x0f\x00" + b"fairseq." * 125_000  # a million letters
BOMBS = {
    "a place in the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a length of bytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "a length of text": b"\x80\x02X\xff\xff\xff\xffx.",
    "a frame": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.",
    "a long number": b"L" + b"9" * 200_000 + b"L\n.",
    "long names": b"\x80\x04" + TEXT + b"q\0X\1\0\0\0xq\1" + b"h\0h\1\x93" * 20_000 + b".",
    "long NumPy numbers": b"\x80\x02cnumpy.core.multiarray\nscalar\nq\1cnumpy\ndtype\nX\2\0\0\0f8\x85Rq\2"
    + (b"c_codecs\nencode\n" + TEXT + b"\x85Rq\3")
    + (b"h\1h\2h\3\x86R0" * 20_000 + b"."),
    "keys that collide": b"\x80\x02}(" + b"".join(number(i * (2**61 - 1)) + b"N" for i in range(30_000)) + b"u.",
}
DEEP = {
    "lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "records": b"\x80\x02cargparse\nNamespace\nq\0" + b"h\0)\x81" * 100_000 + b"b" * 99_999 + b".",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("write", [write_zip, write_legacy])
def test_reading_costs_what_the_file_does(tmp_path, bomb, write):
    path = write(tmp_path / "model.pt", BOMBS[bomb])
    tracemalloc.start()
    message = error_of(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000 + 100 * path.stat().st_size
    assert len(message) < len(str(path)) + 500
    assert "\n" not in message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", DEEP)
def test_depth_does_not_exhaust_the_stack(tmp_path, kind):
    error_of(write_zip(tmp_path / "model.pt", DEEP[kind]))  # an end of the process would be the failure


def error_of(path: Path) -> str:
    """The message with which reading is refused, or nothing."""
    try:
        plain(read_torch_file(path).content)
    except CheckpointError as error:
        return str(error)
    return ""


# Comparing and hashing are in C, where nothing but the end of the process interrupts them.
ENDLESS_IN_C = {
    "a list of storages": pickle.dumps({}, 2) + b"\x80\x02(" + doubled(60, 0) + doubled(60, 100) + b"l.",
    "a key of tuples": b"\x80\x02})q\x000" + b"h\0h\0\x86q\x000" * 60 + b"h\0Ns." + NO_STORAGES,
}


@pytest.mark.parametrize("bomb", ENDLESS_IN_C)
def test_no_comparison_and_no_hash_is_endless(tmp_path, bomb):
    path = tmp_path / "model.pt"
    path.write_bytes(MAGIC + PROTOCOL + SYSTEM + ENDLESS_IN_C[bomb])
    program = "import sys; from lmtools.checkpoints.unpickle import read_torch_file; read_torch_file(sys.argv[1])"
    read = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60, check=False
    )
    assert "lmtools.errors.CheckpointError: " in read.stderr.splitlines()[-1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [b"\x80\x02" + doubled(60, 0) + b".", b"\x80\x02]q\0h\0a."])
def test_options_without_an_end_are_refused(content):
    with pytest.raises(CheckpointError, match="nested deeper"):
        plain(read(content))


opcodes = st.sampled_from([
    *(b"(", b")", b"]", b"}", b"\x8f", b"N", b"\x88", b"K\x01", b"X\x01\x00\x00\x00a", b"0", b"1", b"2"),
    *(b"t", b"\x85", b"\x86", b"\x87", b"l", b"d", b"a", b"e", b"s", b"u", b"\x90", b"\x91", b"b", b"R", b"\x81"),
    *(b"q\x00", b"h\x00", b"\x94", b"cargparse\nNamespace\n", b"ccollections\nOrderedDict\n", b"ctorch\nSize\n"),
    *(b"\x93", b"Q", b"ctorch._utils\n_rebuild_tensor_v2\n", b"cnumpy.core.multiarray\nscalar\n", b"cnumpy\ndtype\n"),
])  # fmt: skip


@given(st.binary(max_size=60) | st.lists(opcodes, max_size=40).map(lambda program: b"".join(program) + b"."))
def test_any_program_is_an_error_or_data(tmp_path_factory, program):
    path = tmp_path_factory.getbasetemp() / "any_program.pt"
    error_of(write_legacy(path, program))  # raises nothing
