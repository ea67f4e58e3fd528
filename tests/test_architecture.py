"""The house's rules: imports run one way, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("httpx", "numpy", "pydantic", "regex", "rich", "sacremoses", "safetensors", "tiktoken", "torch", "zstandard")

REPOSITORY = Path(__file__).parent.parent


def python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter; returns what it prints to stderr."""
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_imports_run_one_way():
    """The contracts are in pyproject.toml."""
    lint = Path(sys.executable).with_name("lint-imports")
    ran = subprocess.run([lint, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert "0 broken" in ran.stdout


def test_importing_the_command_line_loads_nothing_heavy():
    """Not even with the modules of all commands."""
    import_all = "import importlib, pkgutil, sys, lmtools.cli as cli; "
    import_all += (
        "[importlib.import_module(module.name) for module in pkgutil.iter_modules(cli.__path__, 'lmtools.cli.')]; "
    )
    loaded = python(import_all + "print(*sys.modules, file=sys.stderr)").split()
    assert "lmtools.cli.eval" in loaded
    assert set(HEAVY) & set(loaded) == set()


def test_a_command_loads_no_other():
    loaded = python("import sys, lmtools.cli as cli; print(*sys.modules, file=sys.stderr)").split()
    assert [name for name in loaded if name in ("lmtools.cli.eval", "lmtools.cli.train", "lmtools.preprocess")] == []


def test_help_takes_less_than_0_3_seconds_of_cpu():
    """Of several tries the shortest: what else the machine does only adds."""
    command = [sys.executable, "-m", "lmtools", "--help"]
    tries = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        tries.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(tries) < 0.3


TEXT_COMMANDS = {
    "detok": ["detok", "text", "text.detok"],
    "bpe-encode": ["bpe-encode", "--inputs", "text", "--outputs", "text.bpe"],
    "bpe-decode": ["bpe-decode", "--inputs", "ids", "--outputs", "ids.txt"],
    "binarize": ["binarize", "--only-source", "--trainpref", "text", "--destdir", "bin"],
    "renorm-ppl": ["renorm-ppl", "8.46", "--new-tokens", "270847", "--orig-tokens", "245566"],
    "download": ["download", "--list"],
}


@pytest.mark.parametrize("command", TEXT_COMMANDS)
def test_work_on_text_needs_no_torch(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("some words , and more\n")
    Path("ids").write_text("11246 2456\n")
    report = "import sys, atexit, lmtools.cli as cli; "
    report += "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); cli.main()"
    assert python(report, *TEXT_COMMANDS[command]).endswith("False\n")
