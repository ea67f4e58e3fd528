"""The harness's own backend for transformers, on the exported folder, says what lmtools says on the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from lmtools.checkpoints.reshard import reshard
from lmtools.data.dictionary import Dictionary
from lmtools.preprocess.huggingface_tokenizer import tokenizer_files

pytest.importorskip("lm_eval", reason="no lm_eval here; install lmtools[hf]")
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lmtools.harness import LmtoolsLM

pytestmark = pytest.mark.filterwarnings("default")  # the harness and what it brings are not ours

GOLDEN = Path(__file__).parents[1] / "golden"
TASK = {
    "task": "words",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{page}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task as `wikitext` is one: pages of words of the dictionary, some longer than the model's 32 tokens."""
    known = Dictionary.load(GOLDEN / "bin" / "dict.txt")
    words = [word for word in (GOLDEN / "test.txt").read_text("utf-8").split() if word in known][:600]
    pages, start = [], 0
    for length in (5, 32, 33, 100, 1, 200, 64):
        pages.append({"page": " ".join(words[start : start + length])})
        start += length
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    files = {"data_files": {"test": str(tmp_path / "task" / "pages.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "task" / "words.yaml").write_text(json.dumps(TASK | {"dataset_kwargs": files}))
    return tmp_path / "task"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    files = tokenizer_files(Dictionary.load(GOLDEN / "bin" / "dict.txt"), None, max_length=32)
    reshard(GOLDEN / "mp4", tmp_path / "hf", num_parts=1, format="hf", more_files=files)
    return tmp_path / "hf"


def results_of(model: str, model_args: dict[str, str], task: Path) -> dict[str, float]:
    """What `lm_eval run` computes."""
    found = simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=["words"],
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )
    results = found["results"]["words"]
    return {name: results[f"{name},none"] for name in ("word_perplexity", "bits_per_byte")}


def test_word_perplexity_is_that_of_the_backend_for_transformers(task, exported):
    ours = results_of("lmtools", {"path": f"{GOLDEN}/mp4", "dictionary": f"{GOLDEN}/bin"}, task)
    theirs = results_of(
        "hf", {"pretrained": str(exported), "dtype": "float32", "max_length": 32, "add_bos_token": False}, task
    )
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours["word_perplexity"] > 2


def test_likelihoods_and_texts(exported):
    torch.set_num_threads(1)
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
