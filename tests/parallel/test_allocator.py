"""Freed memory is used again, with no page fault, from where a command says so; where torch runs on glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource, sys
import torch
from lmtools.parallel.allocator import keep_freed_memory

def faults(num_times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(num_times):
        kept = [torch.ones(num_bytes, dtype=torch.uint8) for num_bytes in (8 << 20, 32 << 20, 40 << 20)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] != "none":
    keep_freed_memory(torch.device(sys.argv[1]))
faults(8)
print(faults(8))
"""


def page_faults(device: str) -> int:
    """Of what 8 steps write and free, 80 MiB each, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS, device], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_what_was_freed_is_used_again_without_a_page_fault():
    default = page_faults("none")
    assert default > 100
    assert page_faults("cpu") < default / 20
    assert page_faults("cuda") > default / 2, "with a GPU the C library has little to do with activations"
