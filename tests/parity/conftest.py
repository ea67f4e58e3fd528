"""Where genuine fairseq is, for tests that run it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def fairseq_python() -> str:
    """An interpreter that imports fairseq: the one that LMTOOLS_FAIRSEQ_PYTHON names, else this one."""
    python = os.environ.get("LMTOOLS_FAIRSEQ_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('fairseq') is None)"])
    if found.returncode:
        pytest.skip(f"no fairseq in {python}; install lmtools[fairseq], or name another in LMTOOLS_FAIRSEQ_PYTHON")
    return python
