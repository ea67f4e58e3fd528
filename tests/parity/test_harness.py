"""The harness's own backend for transformers, on the exported folder, says what lmtools says on the checkpoint."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtools.checkpoints.reshard import reshard
from lmtools.data.dictionary import Dictionary
from lmtools.preprocess.gpt2_vocabulary import find_vocabulary, read_vocabulary
from lmtools.preprocess.huggingface_tokenizer import tokenizer_files
from tests.support.random_checkpoint import write_random_checkpoint

pytest.importorskip("lm_eval", reason="no lm_eval here; install lmtools[hf]")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
import lm_eval.tasks
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lmtools.harness import LmtoolsLM

pytestmark = pytest.mark.filterwarnings("default")  # the harness and what it brings are not ours

GOLDEN = Path(__file__).parents[1] / "golden"
TASK = {
    "task": "words",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{page}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}


def write_task(folder: Path, task: dict[str, Any], pages: list[dict[str, str]]) -> Path:
    """A task of the harness whose data lie beside it."""
    folder.mkdir()
    (folder / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    files = {"data_files": {"test": str(folder / "pages.jsonl")}, "cache_dir": str(folder / "cache")}
    (folder / "task.yaml").write_text(json.dumps({**task, "dataset_path": "json", "dataset_kwargs": files}))
    return folder


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task as `wikitext` is one: pages of words of the dictionary, some longer than the model's 32 tokens."""
    known = Dictionary.load(GOLDEN / "bin" / "dict.txt")
    words = [word for word in (GOLDEN / "test.txt").read_text("utf-8").split() if word in known][:600]
    pages, start = [], 0
    for length in (5, 32, 33, 100, 1, 200, 64):
        pages.append({"page": " ".join(words[start : start + length])})
        start += length
    return write_task(tmp_path / "task", TASK, pages)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    files = tokenizer_files(Dictionary.load(GOLDEN / "bin" / "dict.txt"), None, max_length=32)
    reshard(GOLDEN / "mp4", tmp_path / "hf", num_parts=1, format="hf", more_files=files)
    return tmp_path / "hf"


def results_of(model: str, model_args: dict[str, Any], task: Path, name: str = "words") -> dict[str, float]:
    """What `lm_eval run` computes."""
    found = simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=[name],
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )
    results = found["results"][name]
    return {name: results[f"{name},none"] for name in ("word_perplexity", "bits_per_byte")}


def test_word_perplexity_is_that_of_the_backend_for_transformers(task, exported):
    ours = results_of("lmtools", {"path": f"{GOLDEN}/mp4", "dictionary": f"{GOLDEN}/bin"}, task)
    theirs = results_of(
        "hf", {"pretrained": str(exported), "dtype": "float32", "max_length": 32, "add_bos_token": False}, task
    )
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours["word_perplexity"] > 2


@pytest.mark.shared
def test_word_perplexity_of_the_harness_own_wikitext(tmp_path, shared_data):
    """Its task, with its way to undo the tokenization and to count words, on two pages of WikiText's test set."""
    wikitext = Path(lm_eval.tasks.__file__).parent / "wikitext" / "wikitext.yaml"
    text = (shared_data / "wikitext-103-raw" / "wiki.test.raw").read_text("utf-8")
    _, *pages = re.split(r"^(?= = [^=].* = $)", text, flags=re.MULTILINE)
    task = write_task(
        tmp_path / "task",
        {
            "include": str(wikitext),
            "task": "wikitext_here",
            "dataset_name": None,
            "training_split": None,
            "validation_split": None,
        },
        [{"page": page} for page in sorted(pages, key=len)[:2]],
    )
    every_id = Dictionary([str(number) for number in reversed(range(50_257))], [1] * 50_257)
    write_random_checkpoint(tmp_path / "model", len(every_id), num_parts=4)
    every_id.save(tmp_path / "model" / "dict.txt")
    files = tokenizer_files(every_id, read_vocabulary(find_vocabulary(None, None)), max_length=64)
    reshard(tmp_path / "model", tmp_path / "hf", num_parts=1, format="hf", dtype=torch.float32, more_files=files)

    ours = results_of("lmtools", {"path": str(tmp_path / "model")}, task, "wikitext_here")
    theirs = results_of(
        "hf",
        {"pretrained": str(tmp_path / "hf"), "dtype": "float32", "max_length": 64, "add_bos_token": False},
        task,
        "wikitext_here",
    )
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours["word_perplexity"] > 50_261


def test_likelihoods_and_texts(exported):
    ours = LmtoolsLM(path=str(GOLDEN / "mp4"), dictionary=str(GOLDEN / "bin"))
    theirs = HFLM(pretrained=str(exported), device="cpu", dtype="float32", max_length=32)
    pairs = [
        ("= and", " ="),
        ("", "= and"),
        ("@-@ &", " &lt;"),
        (" ".join(["= and"] * 20), " = @"),
        ("and", " " + "= " * 9),
    ]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    expected = theirs.loglikelihood(requests)
    for found, wanted in zip(ours.loglikelihood(requests), expected, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
        assert found[1] == wanted[1]
    options = {"until": ["and"], "max_gen_toks": 8, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (context, options), n) for n, context in enumerate(["@-@ &", "&lt;", "="])
    ]
    assert [text.strip() for text in ours.generate_until(requests)] == [
        text.strip() for text in theirs.generate_until(requests)
    ]
