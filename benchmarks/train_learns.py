"""It learns: a 2-way model trained by `lmtools train`, against an interpolated Kneser-Ney model of the same tokens.

    python benchmarks/train_learns.py wiki.valid.tokens --output benchmarks/results/train_learns.md

The text's first 85 % of lines are trained on, 5 % validate, 10 % test. Words seen fewer than 3 times are <unk>, for
both models alike: both read the splits that `lmtools binarize` made, and both are scored on every token of the test
part, ends of line included. Everything is done by lmtools' own commands, which are printed; the curve is drawn by
`lmtools plot`, into the report and beside it as a picture. `--quick` makes a few updates, to try the program.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from learning import lmtools, split_text

from lmtools.data.dictionary import Dictionary
from lmtools.data.indexed import IndexedDataset

PREPARE = (
    "binarize --only-source --trainpref train.txt --validpref valid.txt --testpref test.txt --thresholdsrc 3 "
    "--destdir bin --workers 1"
)
TRAIN = (
    "train bin --mp 2 --arch transformer_lm_megatron_tiny --tokens-per-sample 128 --batch-size 16 --dropout 0.3 "
    "--attention-dropout 0 --optimizer adam --adam-betas 0.9,0.98 --weight-decay 0.1 --clip-norm 1.0 --lr 0.002 "
    "--lr-scheduler cosine --warmup-updates 60 --max-update {updates} --validate-interval-updates {interval} "
    "--keep-interval-updates 1 --no-epoch-checkpoints --save-dir run --log-format simple --log-interval 50 --seed 1"
)
EVALUATE = (
    "eval bin --path run/checkpoint_best --mp 2 --gen-subset test --context-window {context} --batch-size 32 --json"
)


class KneserNey:
    """Interpolated Kneser-Ney with one discount an order (Chen and Goodman 1999, section 3.6 and equation 20).

    The highest order counts n-grams, each lower one in how many contexts an n-gram occurs; below the unigrams every
    type is equally likely. Like the Transformer it reads one stream, across the ends of lines.
    """

    def __init__(self, tokens: Sequence[int], order: int, types: Sequence[int], eos: int) -> None:
        self.order, self.num_types, self.eos = order, len(types), eos
        padded = [*[eos] * (order - 1), *tokens]
        counts: Counter[tuple[int, ...]] = Counter(
            tuple(padded[end - order + 1 : end + 1]) for end in range(order - 1, len(padded))
        )
        self.counts: list[Counter[tuple[int, ...]]] = [Counter()] * order
        self.totals: list[dict[tuple[int, ...], int]] = [{}] * order
        self.followers: list[dict[tuple[int, ...], int]] = [{}] * order
        self.discounts = [0.0] * order
        for length in range(order, 0, -1):
            totals: defaultdict[tuple[int, ...], int] = defaultdict(int)
            followers: defaultdict[tuple[int, ...], int] = defaultdict(int)
            for ngram, count in counts.items():
                totals[ngram[:-1]] += count
                followers[ngram[:-1]] += 1
            once, twice = (sum(count == times for count in counts.values()) for times in (1, 2))
            self.counts[length - 1], self.totals[length - 1], self.followers[length - 1] = counts, totals, followers
            self.discounts[length - 1] = once / (once + 2 * twice) if once else 0.0
            counts = Counter(ngram[1:] for ngram in counts)

    def probability(self, context: tuple[int, ...], token: int) -> float:
        """Of a token after the last `order - 1` tokens."""
        probability = 1 / self.num_types
        for length in range(1, self.order + 1):
            history = context[len(context) - length + 1 :]
            total = self.totals[length - 1].get(history, 0)
            if total:
                count, discount = self.counts[length - 1].get((*history, token), 0), self.discounts[length - 1]
                reserved = discount * self.followers[length - 1][history]
                probability = (max(count - discount, 0.0) + reserved * probability) / total
        return probability

    def loss_base2(self, tokens: Sequence[int]) -> float:
        """Bits per token of a stream, every token scored once."""
        padded = [*[self.eos] * (self.order - 1), *tokens]
        nats = 0.0
        for end in range(self.order - 1, len(padded)):
            nats -= math.log(self.probability(tuple(padded[end - self.order + 1 : end]), padded[end]))
        return nats / len(tokens) / math.log(2)


def require_distribution(model: KneserNey, types: Sequence[int], contexts: Sequence[tuple[int, ...]]) -> None:
    """Over all types the probabilities are 1, after contexts that were seen and ones that were not."""
    for context in contexts:
        total = math.fsum(model.probability(context, token) for token in types)
        if abs(total - 1) > 1e-9:
            sys.exit(f"n-gram model: probabilities after {context} add up to {total}")


def best_ngram(folder: Path) -> tuple[int, float, float, int]:
    """The order that validates best: order, validation loss, test loss, and how many tokens were tested."""
    dictionary = Dictionary.load(folder / "bin" / "dict.txt")
    splits = {name: IndexedDataset(folder / "bin" / name).tokens.tolist() for name in ("train", "valid", "test")}
    types = [index for index in range(len(dictionary)) if index not in (dictionary.bos_index, dictionary.pad_index)]
    models = {order: KneserNey(splits["train"], order, types, dictionary.eos_index) for order in (1, 2, 3, 4, 5)}
    losses = {order: model.loss_base2(splits["valid"]) for order, model in models.items()}
    for order, loss in losses.items():
        print(f"n-gram of order {order}: validation perplexity {2**loss:.2f}", file=sys.stderr)
    order = min(losses, key=lambda order: losses[order])
    unseen = (types[-1],) * (order - 1)
    seen = [tuple(splits["test"][start : start + order - 1]) for start in (0, 1000, 2000)]
    require_distribution(models[order], types, [unseen, *seen])
    return order, losses[order], models[order].loss_base2(splits["test"]), len(splits["test"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="one sentence or paragraph a line, words between spaces")
    parser.add_argument("--updates", type=int, default=900)
    parser.add_argument("--context-window", type=int, default=96, help="of the 128 tokens of a window at evaluation")
    parser.add_argument("--output", type=Path, help="write the report there, and the curve as .png beside it")
    parser.add_argument("--quick", action="store_true", help="a few updates")
    arguments = parser.parse_args()
    updates = 20 if arguments.quick else arguments.updates
    train = TRAIN.format(updates=updates, interval=max(updates // 12, 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        split_text([arguments.text], folder)
        lmtools(PREPARE, folder)
        order, ngram_valid, ngram_test, num_tokens = best_ngram(folder)
        started = time.monotonic()
        lmtools(train, folder)
        minutes = (time.monotonic() - started) / 60
        evaluate = EVALUATE.format(context=arguments.context_window)
        result = json.loads(lmtools(evaluate, folder, capture=True))
        assert result["tokens_scored"] == num_tokens, "both models are scored on the same tokens"
        plain = json.loads(lmtools(EVALUATE.format(context=0), folder, capture=True))
        [run] = json.loads(lmtools("plot run --json", folder, capture=True))["runs"]
        chart = lmtools("plot run --y ppl", folder, capture=True)
        if arguments.output:
            picture = arguments.output.with_suffix(".png").absolute()
            lmtools(f"plot run --y ppl -o {shlex.quote(str(picture))}", folder)
        counts = {name: IndexedDataset(folder / "bin" / name).num_tokens for name in ("train", "valid", "test")}
        dictionary = Dictionary.load(folder / "bin" / "dict.txt")
        unknown = IndexedDataset(folder / "bin" / "test").tokens.tolist().count(dictionary.unk_index) / num_tokens

    ngram = f"interpolated Kneser-Ney, order {order} (the best of 1 to 5)"
    report = f"""# It learns

`python benchmarks/train_learns.py {" ".join([arguments.text.name, *sys.argv[2:]])}`
{len(os.sched_getaffinity(0))} cores ({platform.machine()}), Python {platform.python_version()}, lmtools \
{version("lmtools")}, torch {version("torch")}; {minutes:.1f} minutes of training.
{arguments.text.name}: {counts["train"]:,} tokens to train on, {counts["valid"]:,} to validate, {counts["test"]:,} to \
test; {len(dictionary):,} types; {unknown:.1%} of the test tokens are <unk>.

    lmtools {PREPARE}
    lmtools {train}
    lmtools {evaluate}

| model | validation perplexity | test perplexity | over tokens |
|---|---:|---:|---:|
| {ngram} | {2**ngram_valid:.2f} | {2**ngram_test:.2f} | {num_tokens:,} |
| Transformer, mp 2, no context across blocks | {2 ** run["best"]["loss_base2"]:.2f} | {plain["perplexity"]:.2f} | \
{plain["tokens_scored"]:,} |
| the same, {arguments.context_window} tokens of context for each | | {result["perplexity"]:.2f} | {num_tokens:,} |

The Transformer's test perplexity is {result["perplexity"] / 2**ngram_test:.2f} of the n-gram model's.

```
{chart.rstrip()}
```
"""
    print(report)
    if arguments.output:
        arguments.output.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
