"""lmtools' own sets: what the safetensors library reads too, and what is refused with the file's name."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lmtools.checkpoints.load import open_checkpoint
from lmtools.checkpoints.reshard import reshard
from lmtools.checkpoints.safetensors import open_safetensors
from lmtools.errors import CheckpointError
from tests.support.models import same_bits, values_of


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """The golden model in two parts."""
    reshard(golden / "mp4", tmp_path / "set", num_parts=2, format="safetensors")
    return tmp_path / "set"


def edit(path: Path, change: Any) -> None:
    """Change a manifest in place."""
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_the_safetensors_library_reads_the_same(golden, folder):
    source = open_checkpoint(golden / "mp4")
    halves = []
    for part in range(2):
        with safe_open(folder / f"model-{part}-of-2.safetensors", framework="pt") as opened:
            halves.append({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    assert halves[0].keys() == values_of(source).keys()
    assert torch.equal(
        torch.cat([half["layers.0.fc2.weight"] for half in halves], dim=1), values_of(source)["layers.0.fc2.weight"]
    )
    assert torch.equal(halves[1]["layer_norm.weight"], values_of(source)["layer_norm.weight"])


def test_the_manifest_says_what_it_is_and_what_it_was_made_from(golden, folder):
    manifest = json.loads((folder / "model.json").read_text())
    assert manifest["model"]["vocab_size"] == 160
    assert manifest["num_parameters"] == 22272
    assert manifest["tensors"]["layers.1.fc2.weight"] | {"crc32": 2} == {
        "dtype": "F32",
        "shape": [32, 64],
        "split": "row",
        "crc32": 2,
    }
    for record in manifest["parts"]:
        assert record["sha256"] == hashlib.sha256((folder / record["path"]).read_bytes()).hexdigest()
    assert manifest["origin"]["num_parts"] == 4
    first = golden / "mp4" / "model-model_part-0.pt"
    assert manifest["origin"]["files"][0] == {
        "path": first.name,
        "num_bytes": first.stat().st_size,
        "sha256": hashlib.sha256(first.read_bytes()).hexdigest(),
    }


@pytest.mark.parametrize("name", ["", "model.json", "model-0-of-2.safetensors", "model-1-of-2.safetensors"])
def test_any_of_its_names_opens_the_set(golden, folder, name):
    assert same_bits(values_of(open_checkpoint(folder / name)), values_of(open_checkpoint(golden / "mp4")))


def test_a_missing_part_is_named(folder):
    (folder / "model-1-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1-of-2\.safetensors: part 1 of 2 is missing$"):
        open_checkpoint(folder)


def test_a_set_without_its_manifest_is_not_complete(folder):
    (folder / "model.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.json; the set is not complete"):
        open_checkpoint(folder / "model-0-of-2.safetensors")


def test_parts_of_two_sets_are_refused(golden, folder, tmp_path):
    reshard(golden / "mp4", tmp_path / "other", num_parts=2, format="safetensors")
    shutil.copy(tmp_path / "other" / "model-1-of-2.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"model-1-of-2\.safetensors: belongs to another set"):
        open_checkpoint(folder)


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 100, 3000, 48671])
def test_a_file_that_is_cut_short_is_refused_when_it_is_opened(folder, num_bytes):
    path = folder / "model-0-of-2.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"model-0-of-2\.safetensors: .*(cut short|damaged)"):
        open_checkpoint(folder)


def test_a_flipped_bit_in_a_weight_is_found(folder):
    path = folder / "model-1-of-2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 4
    path.write_bytes(content)
    checkpoint = open_checkpoint(folder)
    checkpoint.verify_part(0)
    with pytest.raises(CheckpointError, match=r"model-1-of-2\.safetensors: the bytes of storage .* have checksum"):
        checkpoint.verify_part(1)


def test_no_damage_to_a_header_ends_in_another_error(folder):
    path = folder / "model-0-of-2.safetensors"
    original = path.read_bytes()
    length = 8 + int.from_bytes(original[:8], "little")
    problems = []
    for position in range(0, length, 7):
        content = bytearray(original)
        content[position] ^= 1 << position % 8
        path.write_bytes(content)
        try:
            values_of(open_safetensors(folder))
        except CheckpointError as error:
            problems.append(str(error))
    assert len(problems) > length // 14
    assert all(path.name in problem and "\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.update(format="other"), "expected lmtools-model"),
        (lambda m: m.update(format_version=2), "lmtools-model version 2, this lmtools reads 1"),
        (lambda m: m.pop("set_id"), "set_id is missing"),
        (lambda m: m.update(parts=[]), "lists no parts|no checksum for each of 0 parts"),
        (lambda m: m["parts"][0].update(path="../model.safetensors"), "part 0 has no file name"),
        (lambda m: m["parts"].pop(), "no checksum for each of 1 parts"),
        (lambda m: m["model"].update(decoder_layers=3), "layers.2.* is missing"),
        (lambda m: m["model"].update(vocab_size="160"), "vocab_size='160', expected a whole number"),
        (lambda m: m["tensors"].update(extra={}), "extra is no parameter of the model"),
        (lambda m: m["tensors"]["layers.0.fc1.bias"].update(split="row"), "has split 'row', expected 'column'"),
        (lambda m: m["tensors"]["layers.0.fc1.bias"].update(dtype="F16"), "not as its manifest says"),
        (lambda m: m["tensors"]["layers.0.fc1.bias"].update(crc32=["zz", "00"]), "no checksum"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder, change, problem):
    edit(folder / "model.json", change)
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_is_no_json_is_refused(folder):
    (folder / "model.json").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=r"model\.json: not a readable manifest"):
        open_checkpoint(folder)
