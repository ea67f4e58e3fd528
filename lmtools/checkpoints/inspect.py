"""What a path is: any file or folder that the pipeline reads or writes, described without reading a weight.

A description is a dict of JSON values: `kind`, what is known of the kind, `tensors` of a checkpoint, and `problems`,
each a line that says where the thing is broken.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmtools.checkpoints.fairseq import fairseq_checkpoint
from lmtools.checkpoints.fairseq_config import model_settings
from lmtools.checkpoints.fairseq_files import PART_NAME, find_parts, parts_found
from lmtools.checkpoints.huggingface_files import WEIGHTS, find_weights, is_huggingface, read_weights
from lmtools.checkpoints.huggingface_read import open_huggingface
from lmtools.checkpoints.lazy_tensor import LazyTensor
from lmtools.checkpoints.load import Checkpoint
from lmtools.checkpoints.models import new_model, plan_of
from lmtools.checkpoints.safetensors import find_manifest, open_safetensors, read_model_manifest
from lmtools.checkpoints.safetensors_files import read_safetensors
from lmtools.checkpoints.training import RECORD_NAME, is_training_checkpoint
from lmtools.checkpoints.training_read import TrainingCheckpoint, open_training
from lmtools.checkpoints.transformer_xl import (
    TransformerXLCheckpoint,
    open_transformer_xl,
    transformer_xl_checkpoint,
)
from lmtools.checkpoints.unpickle import plain, read_torch_file
from lmtools.data.inspect import (
    files_of_split,
    inspect_dictionary,
    inspect_folder,
    inspect_split,
    inspect_text,
    split_files,
)
from lmtools.errors import CheckpointError, DataError
from lmtools.files import is_device_or_pipe
from lmtools.parallel.parallelize import without_memory
from lmtools.parallel.plans import split_of

Description = dict[str, Any]


def inspect_path(path: Path) -> tuple[Description, list[Path]]:
    """Describe a path, and name the files that make it up.

    Raises:
        CheckpointError: it is a checkpoint, broken so early that nothing can be said of it.
        DataError: it is not there, is broken text or data, or nothing that lmtools knows.
    """
    found, files = _inspect(path)
    return {name: _json_value(value) for name, value in found.items()}, files


def _inspect(path: Path) -> tuple[Description, list[Path]]:
    if is_device_or_pipe(path):
        raise DataError(f"{path}: is a device or a pipe, and can be read once at most; expected a file or a folder")
    if path.is_dir() and not any(path.iterdir()):
        raise DataError(f"{path}: an empty folder")
    if is_training_checkpoint(path) or path.name == RECORD_NAME:
        return _training(path if path.is_dir() else path.parent)
    if find_manifest(path) is not None:
        return _safetensors_set(path)
    if is_huggingface(path):
        return _of_transformers(path)
    if path.name in WEIGHTS and is_huggingface(path.parent):
        if find_weights(path.parent) == [path]:
            return _of_transformers(path.parent)
        return {"kind": "torch file", **_tensors(read_weights(path))}, [path]  # the model is in model.safetensors
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".pt" or not path.exists():
        return _fairseq(path)
    match path.suffix:
        case ".safetensors":
            tensors = read_safetensors(path)
            return {"kind": "safetensors file", **_tensors(tensors)}, [path]
        case ".idx" | ".bin":
            return inspect_split(path.with_suffix("")), files_of_split(path.with_suffix(""))
        case ".json":
            return _json(path), [path]
    if path.name.startswith("dict") and path.suffix == ".txt":
        return inspect_dictionary(path), [path]
    with open(path, "rb") as stream:
        beginning = stream.read(4)
    if beginning.startswith((b"PK\x03\x04", b"\x80\x02")):
        return _fairseq(path)
    return inspect_text(path), [path]


def _folder(path: Path) -> tuple[Description, list[Path]]:
    runs = sorted(entry.name for entry in path.iterdir() if is_training_checkpoint(entry))
    if runs:
        return {"kind": "training run", "checkpoints": runs}, []
    files = list(split_files(path))
    if not files and any(path.glob("*.pt")):
        return _fairseq(path)
    if files or (path / "dict.txt").is_file():
        return inspect_folder(path), sorted(files + [name for name in [path / "dict.txt"] if name.is_file()])
    raise DataError(f"{path}: holds no checkpoint, no binarized data and nothing else that lmtools knows")


def _training(path: Path) -> tuple[Description, list[Path]]:
    checkpoint = open_training(path)
    record = checkpoint.record
    known = {key: record[key] for key in ("valid_loss", "end_of_epoch") if key in record}
    progress = record.get("progress")
    facts = {"kind": "training checkpoint", **(progress if isinstance(progress, dict) else {}), **known}
    return _described(checkpoint, facts)


def _safetensors_set(path: Path) -> tuple[Description, list[Path]]:
    location = find_manifest(path)
    assert location is not None
    manifest = read_model_manifest(location)
    facts: Description = {"kind": "lmtools checkpoint", "set_id": manifest["set_id"], "origin": manifest["origin"]}
    try:
        return _described(open_safetensors(path), facts)
    except CheckpointError as error:
        records = [record for record in manifest["parts"] if isinstance(record, dict)]
        files = [location.parent / str(record.get("path")) for record in records]
        missing = [file.name for file in files if not file.is_file()]
        facts |= {"num_parts": len(files), "parts_missing": missing, "model": manifest["model"]}
        return facts | {"problems": [str(error)]}, [file for file in files if file.is_file()]


def _of_transformers(folder: Path) -> tuple[Description, list[Path]]:
    checkpoint = open_transformer_xl(folder) or open_huggingface(folder)
    facts: Description = {"kind": "checkpoint of transformers"}
    if isinstance(checkpoint, TransformerXLCheckpoint) and checkpoint.vocabulary_path is not None:
        facts["vocabulary"] = checkpoint.vocabulary_path.name
    return _described(checkpoint, facts)


def _fairseq(path: Path) -> tuple[Description, list[Path]]:
    """fairseq's files, and the original Transformer-XL's: each part by itself, then all together."""
    paths = parts_found(path)
    if not paths:
        raise DataError(f"{path}: no such file or folder, and no part checkpoint of that stem")
    contents: dict[Path, Mapping[str, Any]] = {}
    containers = {}
    problems = []
    for part in paths:
        try:
            file = read_torch_file(part)
            if not isinstance(file.content, Mapping):
                raise CheckpointError(f"{part}: holds no table of names, so no checkpoint")
            contents[part], containers[part] = file.content, file.format
        except CheckpointError as error:
            problems.append(str(error))
    facts: Description = {"kind": "torch file", "parts_found": len(paths)}
    if not contents:
        return facts | {"problems": problems}, paths
    first, content = next(iter(contents.items()))
    facts["container"] = containers[first]
    is_fairseqs = isinstance(content.get("model"), Mapping)
    if is_fairseqs:
        facts |= {"kind": "fairseq checkpoint", **_fairseq_facts(content, first, paths)}
    try:
        if not problems:
            find_parts(path)  # refuses parts of which one is missing
            transformer_xl = transformer_xl_checkpoint(contents)
            if transformer_xl is not None:
                kind = "fairseq checkpoint" if is_fairseqs else "the original's state dict"
                facts |= {"kind": f"{kind} of a Transformer-XL", "tokens_per_sample": transformer_xl.tokens_per_sample}
                return _described(transformer_xl, facts)
            if is_fairseqs:
                return _described(fairseq_checkpoint(contents), facts)
    except CheckpointError as error:
        problems.append(str(error))
    if not is_fairseqs:
        facts["entries"] = [str(name) for name in content]
    held = content["model"] if is_fairseqs else content
    tensors = {str(name): value for name, value in held.items() if isinstance(value, LazyTensor)}
    return facts | {**_tensors(tensors), "problems": problems}, paths


def _fairseq_facts(content: Mapping[str, Any], path: Path, paths: list[Path]) -> Description:
    """What one part says of all: the options, and how far the run was."""
    facts: Description = {"options": "cfg" if content.get("cfg") else "args"}
    try:
        settings = model_settings(plain({key: content.get(key) for key in ("args", "cfg")}), str(path))
        facts["arch"] = settings.get("arch")
        expected = settings.get("model_parallel_size") or 1
        named = {int(match["part"]): match["stem"] for each in paths if (match := PART_NAME.fullmatch(each.name))}
        if named and type(expected) is int and 1 < expected < 10_000:
            stem = next(iter(named.values()))
            missing = [f"{stem}-model_part-{part}.pt" for part in range(expected) if part not in named]
            facts |= {"num_parts": expected, "parts_missing": missing}
        history = plain(content.get("optimizer_history") or [{}])
        iterator = plain((content.get("extra_state") or {}).get("train_iterator") or {})
        facts |= {"num_updates": history[-1].get("num_updates"), "epoch": iterator.get("epoch")}
    except (CheckpointError, AttributeError, IndexError, TypeError) as error:
        facts["unreadable"] = str(error)
    facts["optimizer_state"] = bool(content.get("last_optimizer_state"))
    record = content.get("lmtools")
    if isinstance(record, Mapping):
        facts |= {key: plain(record[key]) for key in ("set_id", "origin") if key in record}
    return facts


def _described(checkpoint: Checkpoint, facts: Description) -> tuple[Description, list[Path]]:
    """A checkpoint that is whole: its model and the whole shape of each parameter."""
    dtypes = checkpoint.dtypes
    with without_memory():
        model = new_model(checkpoint.config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    plan = plan_of(checkpoint.config)
    tensors = [
        {
            "name": name,
            "dtype": str(dtypes[name]).removeprefix("torch."),
            "shape": list(shape),
            "split": split_of(name, plan).value,
        }
        for name, shape in shapes.items()
    ]
    parts = "num_files" if isinstance(checkpoint, TrainingCheckpoint) else "num_parts"
    facts = facts | {parts: checkpoint.num_parts, "num_parameters": sum(map(math.prod, shapes.values()))}
    return facts | {"model": asdict(checkpoint.config), "tensors": tensors, "problems": []}, list(checkpoint.paths)


def _tensors(tensors: Mapping[str, LazyTensor]) -> Description:
    """Tensors as they are in one file; those that share their elements are counted once."""
    distinct = {(id(t.storage), t.storage_offset, t.shape): t for t in tensors.values() if t.dtype.is_floating_point}
    return {
        "num_elements": sum(math.prod(shape) for _, _, shape in distinct),
        "tensors": [
            {"name": name, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for name, t in tensors.items()
        ],
    }


def _json(path: Path) -> Description:
    """A result, a manifest, or JSON of someone else's."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{path}: JSON, but no object; nothing that lmtools writes")
    if isinstance(document.get("results"), list):
        return {"kind": "results of eval", "results": [_result(each) for each in document["results"]]}
    kinds = {"lmtools-eval": "result of eval", "lmtools-manifest": "manifest"}
    kind = kinds.get(str(document.get("format")))
    if kind is None:
        raise DataError(f"{path}: JSON of another program (format {document.get('format')!r})")
    if kind == "manifest":
        keys = ("tool", "tool_version", "options", "inputs", "outputs", "counts", "original")
        return {"kind": kind} | {key: document.get(key) for key in keys}
    return {"kind": kind} | _result(document)


def _result(document: Any) -> Description:
    keys = (
        "subset", "loss_base2", "perplexity", "tokens_scored", "tokens_skipped", "tokens_unk", "word_perplexity",
        "tokens_per_sample", "context_window", "dtype", "path", "data", "num_parts", "mp", "dp", "seconds",
    )  # fmt: skip
    return {key: document.get(key) for key in keys} if isinstance(document, dict) else {}


def _json_value(value: Any) -> Any:
    """What a file holds may be anything; what is shown is JSON."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return reprlib.repr(value)
