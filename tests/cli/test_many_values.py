"""Several values after one flag, as argparse's nargs="+" takes them."""

from __future__ import annotations

import pytest

from lmtools.cli.many_values import repeat_flags


@pytest.mark.parametrize(
    ("line", "repeated"),
    [
        ("--inputs a", "--inputs a"),
        ("--inputs a b c", "--inputs a --inputs b --inputs c"),
        ("--inputs a --inputs b", "--inputs a --inputs b"),
        ("--inputs=a b", "--inputs=a --inputs b"),
        ("--inputs a b --outputs c d --keep-empty", "--inputs a --inputs b --outputs c --outputs d --keep-empty"),
        ("--inputs - b", "--inputs - --inputs b"),
        ("--workers 2 --inputs a b --workers 3 c", "--workers 2 --inputs a --inputs b --workers 3 c"),
        ("--inputs --outputs c", "--inputs --outputs c"),
        ("a b", "a b"),
        ("", ""),
    ],
)
def test_only_these_flags_are_repeated(line: str, repeated: str) -> None:
    assert repeat_flags(line.split(), {"--inputs", "--outputs"}) == repeated.split()
