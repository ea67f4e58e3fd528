"""The main job from end to end, in the README's own words: raw text to a renormalised perplexity."""

from __future__ import annotations

import json
import math

import pytest

from tests.support.documents import REPOSITORY, blocks, run_block
from tests.support.random_checkpoint import write_random_checkpoint

MAIN_JOB, BY_HAND, *_ = blocks(REPOSITORY / "README.md", "sh")


@pytest.mark.slow
def test_main_job_on_any_text(golden, tmp_path):
    """On a fresh clone: a small text, GPT-2's dictionary, and 8 random parts with fairseq's padding to 64 rows."""
    (tmp_path / "wiki.test.raw").write_bytes((golden / "train.txt").read_bytes())
    (tmp_path / "dict.txt").write_text("".join(f"{token} 1\n" for token in range(50257)))
    write_random_checkpoint(tmp_path / "CHECKPOINT", vocab_size=50304, num_parts=8)

    out = run_block(MAIN_JOB, tmp_path)

    assert (tmp_path / "wiki.test.detok").read_bytes() == (golden / "train.detok").read_bytes()
    raw, bpe = (tmp_path / "wiki.test.raw").read_text(), (tmp_path / "wiki.test.bpe").read_text()
    orig_tokens, new_tokens = (len(text.split()) + text.count("\n") for text in (raw, bpe))
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["tokens_scored"], result["original"]["tokens"]) == (new_tokens, orig_tokens)
    assert f"test: 2 ** ({result['loss_base2']:.4f} * {new_tokens:,} / {orig_tokens:,}) = " in out
    printed = float(out.partition(f"{orig_tokens:,}) = ")[2].split()[0].replace(",", ""))
    assert printed == pytest.approx(2 ** (result["loss_base2"] * new_tokens / orig_tokens), rel=1e-3)


def test_genuine_checkpoint_of_a_word_model(golden, tmp_path):
    """On a fresh clone: fairseq's 4 parts in one process, its text and dictionary, and the loss that it found."""
    for name, source in {"test.txt": "test.txt", "dict.txt": "bin/dict.txt", "CHECKPOINT": "mp4"}.items():
        (tmp_path / name).symlink_to(golden / source)
    out = run_block(
        "lmtools binarize --only-source --testpref test.txt --srcdict dict.txt --destdir data-bin\n"
        "lmtools eval data-bin --path CHECKPOINT --context-window 24 --output result.json > /dev/null\n"
        "lmtools renorm-ppl --result result.json --orig-tokens 1000 --json\n",
        tmp_path,
    )
    assert (tmp_path / "data-bin" / "test.bin").read_bytes() == (golden / "bin" / "test.bin").read_bytes()
    published = json.loads((golden / "mp4" / "eval" / "ctx24.json").read_text())
    renormalized = json.loads(out[out.index("{") :])
    assert renormalized["loss_base2"] == pytest.approx(published["loss_base2"], rel=1e-5)
    assert renormalized["new_tokens"] == published["count"]
    bits = published["loss_base2"] * published["count"] / 1000
    assert renormalized["renormalized_perplexity"] == pytest.approx(2**bits, rel=1e-4)


@pytest.mark.slow
@pytest.mark.shared
def test_main_job_on_wikitext(shared_golden, shared_data, tmp_path):
    """An excerpt of WikiText-103's test set, and 8 parts that fairseq trained: fairseq's bytes and loss all the way."""
    raw = (shared_data / "wikitext-103-raw" / "wiki.test.raw").read_bytes().splitlines(keepends=True)
    detok = (shared_golden / "detok" / "wiki.test.detok").read_bytes().split(b"\n")
    filled = [number for number, line in enumerate(detok) if line.strip()]
    first, last = filled[500], filled[559]  # the split that fairseq evaluated is 60 lines of BPE, from the 501st on
    excerpt = raw[first : last + 1]
    (tmp_path / "wiki.test.raw").write_bytes(b"".join(excerpt))
    (tmp_path / "dict.txt").symlink_to(shared_golden / "bin" / "built_1k" / "dict.txt")
    (tmp_path / "CHECKPOINT").symlink_to(shared_golden / "mp8")

    out = run_block(MAIN_JOB, tmp_path)

    assert (tmp_path / "wiki.test.detok").read_bytes() == b"\n".join(detok[first : last + 1]) + b"\n"
    assert (tmp_path / "wiki.test.bpe").read_bytes() == (shared_golden / "bin" / "test_small.bpe").read_bytes()
    for name in ("test.bin", "test.idx"):
        theirs = (shared_golden / "bin" / "built_1k" / name).read_bytes()
        assert (tmp_path / "wikitext103-bin" / name).read_bytes() == theirs
    published = json.loads((shared_golden / "mp8" / "eval" / "ctx48_bs8.json").read_text())
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["loss_base2"] == pytest.approx(published["loss_base2"], rel=1e-5)
    assert result["tokens_scored"] == published["count"] == 7301
    orig_tokens = sum(len(line.split()) + 1 for line in excerpt)
    assert f"= {2 ** (result['loss_base2'] * 7301 / orig_tokens):,.2f}\n" in out


@pytest.mark.slow
@pytest.mark.shared
def test_published_counts_of_the_whole_test_set(shared_golden, shared_data, tmp_path):
    """All of it as far as the dictionary; the manifest at the end has both counts."""
    (tmp_path / "wiki.test.raw").symlink_to(shared_data / "wikitext-103-raw" / "wiki.test.raw")
    (tmp_path / "dict.txt").symlink_to(shared_golden / "bin" / "gpt2_dict.txt")
    run_block("".join(MAIN_JOB.splitlines(keepends=True)[:3]), tmp_path)
    for name in ("test.bin", "test.idx"):
        theirs = (shared_golden / "bin" / "gpt2_test" / name).read_bytes()
        assert (tmp_path / "wikitext103-bin" / name).read_bytes() == theirs
    manifest = json.loads((tmp_path / "wikitext103-bin" / "test.meta.json").read_text())
    assert (manifest["counts"]["sentences"], manifest["counts"]["tokens"]) == (2891, 270_847)
    assert (manifest["original"]["words"], manifest["original"]["tokens"]) == (241_211, 245_569)
    assert manifest["counts"]["replaced_tokens"] == 0


def test_published_renormalisation(tmp_path):
    out = run_block(BY_HAND, tmp_path)
    assert out.startswith("2 ** (3.0807 * 270,847 / 245,566) = 10.54\n")
    assert math.isclose(2 ** (math.log2(8.46) * 270847 / 245566), 10.54, abs_tol=0.001)
