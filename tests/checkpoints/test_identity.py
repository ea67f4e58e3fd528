"""Another checkpoint under the same name is another one, and the same one is the same."""

from __future__ import annotations

import os

from lmtools.checkpoints.identity import identity_of_files


def test_names_sizes_and_times_of_change(tmp_path):
    path = tmp_path / "run" / "model.pt"
    path.parent.mkdir()
    path.write_bytes(b"one")
    os.utime(path, ns=(5, 7))
    first = identity_of_files([path])
    assert first == {"checkpoint_files": [["model.pt", 3, 7]]}
    assert identity_of_files([path], below=tmp_path) == {"checkpoint_files": [["run/model.pt", 3, 7]]}
    os.utime(path, ns=(5, 8))
    assert identity_of_files([path]) != first
    path.write_bytes(b"more")
    os.utime(path, ns=(5, 7))
    assert identity_of_files([path]) != first
