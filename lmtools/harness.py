"""lm-evaluation-harness with a model of its kind, `lmtools`, for every checkpoint that lmtools reads.

    python -m lmtools.harness run --model lmtools --model_args path=CHECKPOINT,dictionary=DICT --tasks wikitext

is the harness's own command line, `lm_eval`, which has no other way to learn of a model. One process, whole model.
Tokens, windows and truncation are those of the harness's backend for transformers on an exported folder. One thing is
not: for a whole text (`loglikelihood_rolling`) that one scores the `</s>` before it too, unless `add_bos_token=False`.

Source: https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401 - the harness's own: it takes a registry that has one model already for full
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from lmtools.checkpoints.load import load_transformer_lm, open_checkpoint, require_transformer_lm
from lmtools.cli.dictionaries import Bpe, open_codec
from lmtools.generate.decode import Limits, continue_prompts
from lmtools.generate.sampling import Sampling
from lmtools.models.transformer_lm import PAD_INDEX
from lmtools.parallel.mesh import make_mesh

_MAX_NEW_TOKENS = 256  # the harness's own default


@register_model("lmtools")
class LmtoolsLM(TemplateLM):  # type: ignore[misc] # the harness has no types
    """A checkpoint as the harness asks for it."""

    def __init__(
        self,
        path: str,
        dictionary: str | None = None,
        bpe: str | None = None,
        dtype: str = "float32",
        batch_size: int | str = 8,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """Load a checkpoint.

        Args:
            path: what `eval --path` takes.
            dictionary: dict.txt or its folder, as `generate --dict`.
            bpe: `gpt2` or `none`, as `generate --bpe`.
            dtype: what the model computes in.
            batch_size: texts at a time; `auto` is 8.
            device: "cpu" or "cuda"; None is cuda where there is one.
            max_batch_size: accepted for the harness's sake.
        """
        super().__init__()
        checkpoint = open_checkpoint(path)
        config = require_transformer_lm(checkpoint, "the harness takes plain transformers")
        place = Path(dictionary) if dictionary else None
        self._codec, self._eos_index, _ = open_codec(checkpoint, place, Bpe(bpe) if bpe else None, None, None)
        self._mesh = make_mesh(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), dp=1, tp=1)
        self._model = load_transformer_lm(checkpoint, self._mesh, getattr(torch, dtype))
        self.max_length = config.max_target_positions
        self._batch_size = int(batch_size) if str(batch_size).isdecimal() else 8

    @property
    def eot_token_id(self) -> int:
        """What ends a text, and so stands before one."""
        return self._eos_index

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, after the one that stands before a text unless `add_special_tokens` is False."""
        before = [] if add_special_tokens is False else [self._eos_index]
        return before + self._codec.encode(string)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, in windows that do not overlap."""
        windows = []
        of_request = []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False),
                self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((("", ""), context, continuation))
                of_request.append(number)
        sums = [0.0] * len(requests)
        for number, (log_prob, _) in zip(of_request, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += log_prob
        return sums

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one."""
        # As for transformers: a text that is too long loses its beginning.
        texts = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
        longest_first = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for batch in _pieces(longest_first, self._batch_size):
            width = len(texts[batch[0]]) - 1
            rows = [[*texts[number][:-1], *[PAD_INDEX] * (width + 1 - len(texts[number]))] for number in batch]
            hidden = self._model.features(torch.tensor(rows, device=self._mesh.device))
            for row, number in enumerate(batch):
                end = len(texts[number]) - 1
                start = max(end - len(requests[number][2]), 0)
                targets = torch.tensor(texts[number][start + 1 :], device=self._mesh.device)
                found[number] = self._score(hidden[row, start:end], targets)
        return found

    def _score(self, hidden: Tensor, targets: Tensor) -> tuple[float, bool]:
        log_probs = self._model.output_projection(hidden).float().log_softmax(dim=-1)
        total = log_probs.gather(-1, targets[:, None]).double().sum()
        return float(total), bool((log_probs.argmax(dim=-1) == targets).all())

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A continuation of each text, up to the first of its stop strings."""
        return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, options: dict[str, Any]) -> str:
        num_new = min(int(options.get("max_gen_toks", _MAX_NEW_TOKENS)), self.max_length - 1)
        prompt = self.tok_encode(context)[-(self.max_length - num_new) :]
        limits = Limits([*self._codec.known, self._eos_index], self._eos_index, num_new, self.max_length)
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        sampling = Sampling(temperature, int(options.get("top_k", 0)), float(options.get("top_p", 1.0)))
        [found] = continue_prompts(self._model, [prompt], self._mesh, limits, sampling)
        text = self._codec.decode(found.tokens)
        stops = options.get("until") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop)[0] if stop else text
        return text


def _pieces(numbers: list[int], size: int) -> Iterable[list[int]]:
    return (numbers[start : start + size] for start in range(0, len(numbers), size))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
