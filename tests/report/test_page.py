"""The page: one file that needs nothing, says what it knows, and escapes all that it was given."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest

from lmtools.report.content import collect
from lmtools.report.page import counted, duration, render, run_row
from lmtools.train.curves import read_runs
from tests.support.results import write_data, write_metrics, write_result

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """A page taken apart: tags that close as they opened, ids, and text."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(content.decode())
        self.close()
        assert self.open == []
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        named = dict(attributes)
        self.ids += [named["id"]] if "id" in named else []
        self.addresses += [named[name] for name in ("href", "src", "action") if name in named]
        assert not any(name.startswith("on") for name in named)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


@pytest.fixture
def folder(tmp_path):
    write_result(tmp_path / "one.json", write_data(tmp_path), tmp_path / "one.npy")
    write_metrics(tmp_path / "run", losses=[9, 8, 7.5, 7], valid={2: 8.5, 4: 7.25})
    return tmp_path


def page_of(*sources, title="report", **options) -> Page:
    return Page(render(title, collect(sources, **options)))


def test_everything_is_shown_in_order(folder):
    page = page_of(folder / "run", folder / "one.json")
    assert page.ids == ["results", "training", "loss", "passages", "throughput", "provenance"]
    assert "4.32 bits" not in page.text
    for said in (
        "bits per token over 400 tokens",
        "over 350 words and line ends of test.raw",
        "Over 2,000 bytes of the original text",
        "Windows of 8 tokens, of which the first 4 are context and not scored; float32, checkpoint checkpoints",
        "25 of the tokens are <unk>.",
        "valid 7.250 bits",
        "hardest 1:",
        "easiest 3:",
        "cpu, mp 1 × dp 1, float32",
        "test.raw raw text",
        "lmtools detok 0.1.0",
    ):
        assert said in page.text, said


def test_it_needs_nothing_that_is_not_in_it(folder):
    content = render("report", collect([folder / "run", folder / "one.json"]))
    page = Page(content)
    assert page.addresses == []
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not re.search(rb"url\(|@import|https?://", content)
    assert b"default-src 'none'" in content


def test_it_is_the_same_each_time(folder):
    first, second = (render("report", collect([folder / "run", folder / "one.json"])) for _ in range(2))
    assert first == second


def test_tokens_names_and_titles_are_text_whatever_they_say(folder):
    """A word of the dictionary is a script; so are the title, the folder, the checkpoint and a manifest's option."""
    evil = folder / "<img src=x onerror=alert(1)>"
    evil.mkdir()
    data = write_data(evil)
    write_result(evil / f"{EVIL.replace('/', '')}.json", data, evil / "s.npy", path=EVIL, versions={"torch": EVIL})
    write_metrics(evil / "run", losses=[2, 1], valid={1: 1.0})
    page = page_of(evil / f"{EVIL.replace('/', '')}.json", evil / "run", folder / "one.json", title=EVIL)
    assert page.tags.isdisjoint({"script", "img"})
    assert page.text.count(EVIL) > 3, "the title, the checkpoint, tokens"


def test_without_scores_the_rest_is_shown(folder):
    (folder / "one.npy").unlink()
    page = page_of(folder / "one.json")
    assert page.ids == ["results", "throughput", "provenance", "missing"]
    assert "the tokens' scores are not at" in page.text
    assert "Training curves: name the folder of the run" in page.text


def test_without_data_hashes_are_the_chain(folder):
    shutil.rmtree(folder / "bin")
    page = page_of(folder / "one.json")
    assert "its data is not at" in page.text
    assert "the steps from test.raw to the data; give the folders of their manifests" in page.text
    assert re.search(r"test\.bin\s?[0-9a-f]{64}", page.text)


def test_manifests_elsewhere(folder):
    (folder / "kept").mkdir()
    (folder / "test.detok.meta.json").rename(folder / "kept" / "test.detok.meta.json")
    assert "the steps from test.raw" in page_of(folder / "one.json", folder / "run").text
    page = page_of(folder / "one.json", folder / "run", manifests=[folder / "kept"])
    assert "missing" not in page.ids
    assert "test.raw raw text" in page.text


def test_several_results_are_side_by_side(folder):
    write_result(folder / "two.json", folder / "bin", folder / "two.npy", bits=0.5, tokens_skipped=4)
    page = page_of(folder / "one.json", folder / "two.json", folder / "run")
    assert page.ids[:2] == ["results", "comparison"]
    assert "All are of the same 400 tokens" in page.text
    assert "4 of 400 tokens were not scored" in page.text


def test_runs_alone(folder):
    page = page_of(folder / "run")
    assert page.ids == ["training", "throughput"]


def test_a_result_of_a_part_of_the_numbers(folder):
    write_result(
        folder / "two.json",
        folder / "bin",
        folder / "two.npy",
        word_perplexity=None,
        bits_per_byte=None,
        original=None,
        original_from=None,
        tokens_per_sample=None,
        sample_break_mode=None,
        tokens_per_second=None,
        seconds=0.0,
        tokens_resumed=100,
        bits=math.log2(1e200),
    )
    page = page_of(folder / "two.json")
    assert "1e+200 perplexity per token" in page.text
    assert "without the 100 tokens of a run before" in page.text
    assert "Loss by token frequency" in page.text
    assert "Loss by position in" not in page.text
    assert "loss by position; the result does not say how the text was cut" in page.text


def test_a_model_with_memory_reads_chunks(folder):
    without = {"context_window": None, "sample_break_mode": None}
    write_result(folder / "txl.json", folder / "bin", folder / "txl.npy", mem_len=640, tokens_skipped=7, **without)
    page = page_of(folder / "txl.json")
    assert "Chunks of 8 tokens, with a memory of the 640 before" in page.text
    assert "7 of 400 tokens were not scored: as in fairseq, the first of each chunk" in page.text
    assert "Loss by position" in page.text


def test_a_path_that_is_no_text(folder):
    path = folder / "caf\udce9.json"
    shutil.copy(folder / "one.json", path)
    assert b"caf?" in render("report", collect([path]))


def test_times_are_as_people_say_them():
    assert [duration(seconds) for seconds in (0, 119, 120, 7199, 7200)] == [
        "0.0 s",
        "119.0 s",
        "2.0 min",
        "120.0 min",
        "2.0 h",
    ]


def test_what_a_manifest_may_hold():
    assert [counted(value) for value in (1234567, 0.5, True, "x", None)] == ["1,234,567", "0.5", "True", "x", "None"]


def test_throughput_of_a_run_is_that_of_its_updates(tmp_path):
    """A minute each, of a run that validated for an hour; of a single update too, which began with the run."""
    line = {"kind": "update", "loss_base2": 2.0, "num_tokens": 6000, "skipped": None, "update_seconds": 60.0}
    for num_updates in (1, 3):
        lines = [line | {"num_updates": number + 1, "seconds": 3660.0 * number} for number in range(num_updates)]
        (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        [run] = read_runs([tmp_path / "run.jsonl"])
        row = run_row(run)
        assert (row["tokens_per_second"], row["training_seconds"]) == (100.0, 60.0 * num_updates)
