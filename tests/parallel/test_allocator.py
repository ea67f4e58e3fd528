"""Freed memory is used again, with no page fault, from where a command says so; where torch runs on glibc."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import json, os, resource
import torch
from lmtools.parallel.allocator import tune_cpu_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        kept = [torch.ones(num_bytes, dtype=torch.uint8) for num_bytes in (8 << 20, 32 << 20, 40 << 20)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = {"default": faults()}
for device in ("cuda", "cpu"):
    tune_cpu_memory(torch.device(device))
    faults()
    found[device] = faults()
found["kernels"] = [os.environ[name] for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")]
print(json.dumps(found))
"""
"""Of 8 steps that write and free 80 MiB each."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_what_was_freed_is_used_again_without_a_page_fault():
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    environment["LRU_CACHE_CAPACITY"] = "7"
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True, env=environment
    )
    faults = json.loads(done.stdout)
    assert faults["default"] > 100
    assert faults["cuda"] > faults["default"] / 2, "with a GPU the C library has little to do with activations"
    assert faults["cpu"] < faults["default"] / 20
    assert faults["kernels"] == ["7", "128"], "few kernels are kept, or as many as the user says"
