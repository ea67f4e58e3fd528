"""Evaluates with fairseq's own program and keeps the score of every token.

Run by an interpreter that has fairseq, which need not have lmtools:

    python score_with_fairseq.py OUT.npz ARGUMENTS_OF_FAIRSEQ_EVAL_LM...

OUT.npz: `tokens` and `scores` in the order of the split, and `loss`, what fairseq printed, in bits per token.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm


def main() -> None:
    """Run `fairseq-eval-lm` in this process, with a scorer that writes down what it gives."""
    out, *arguments = sys.argv[1:]
    kept: list[tuple[int, Any, Any]] = []

    class Recorder(eval_lm.SequenceScorer):  # type: ignore[misc]
        def generate(self, models: Any, sample: Any, **options: Any) -> Any:
            found = super().generate(models, sample, **options)
            for number, [best, *_] in zip(sample["id"].tolist(), found, strict=True):
                kept.append((number, best["tokens"].cpu().numpy(), best["positional_scores"].float().cpu().numpy()))
            return found

    eval_lm.SequenceScorer = Recorder
    parsed = options.parse_args_and_arch(options.get_eval_lm_parser(), arguments)
    result = eval_lm.main(convert_namespace_to_omegaconf(parsed))
    kept.sort(key=lambda example: example[0])  # without a context window blocks come in another order
    empty = np.empty(0, dtype=np.float32)
    tokens = np.concatenate([empty.astype(np.int64), *(tokens for _, tokens, _ in kept)])
    scores = np.concatenate([empty, *(scores for _, _, scores in kept)])
    np.savez(out, tokens=tokens, scores=scores, loss=float(result["loss"]))


if __name__ == "__main__":
    main()
