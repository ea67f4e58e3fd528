"""The shape of a model, and named presets as plain functions: `transformer_lm_megatron_11b(vocab_size=51200)`.

No torch here: the command line reads the fields to make its options.

The numbers are those of fairseq/models/transformer_lm.py, fairseq/model_parallel/models/transformer_lm.py and
fairseq/examples/truncated_bptt/transformer_xl_model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from lmtools.errors import ConfigError

ActivationName = Literal["relu", "gelu", "gelu_accurate"]


@dataclass(frozen=True)
class TransformerLMConfig:
    """The shape of a model; fields are named as fairseq's options.

    Attributes:
        vocab_size: rows of the embedding that the checkpoint holds, fairseq's `madeupword` padding included. They
            all take part in the softmax.
        decoder_layers: number of blocks.
        decoder_embed_dim: width of the residual stream.
        decoder_ffn_embed_dim: width of the feed-forward layer.
        decoder_attention_heads: number of attention heads; must divide `decoder_embed_dim`.
        max_target_positions: the longest window that the model was made for.
        activation_fn: of the feed-forward layer; `gelu` is by erf, `gelu_accurate` by tanh.
        decoder_normalize_before: LayerNorm before each sublayer and once at the end (pre-norm), else after each.
        no_decoder_final_norm: leave out the pre-norm model's last LayerNorm.
        decoder_learned_pos: learned positions instead of sinusoidal ones.
        no_token_positional_embeddings: no positions at all.
        layernorm_embedding: a LayerNorm on the embedded input.
        no_scale_embedding: do not multiply the embeddings by sqrt(embed_dim).
        share_decoder_input_output_embed: the output projection is the embedding.
        dropout: on the embedded input and on what each sublayer adds.
        attention_dropout: on the attention weights.
        activation_dropout: after the feed-forward's activation.
    """

    vocab_size: int
    decoder_layers: int = 6
    decoder_embed_dim: int = 512
    decoder_ffn_embed_dim: int = 2048
    decoder_attention_heads: int = 8
    max_target_positions: int = 1024
    activation_fn: ActivationName = "relu"
    decoder_normalize_before: bool = False
    no_decoder_final_norm: bool = False
    decoder_learned_pos: bool = False
    no_token_positional_embeddings: bool = False
    layernorm_embedding: bool = False
    no_scale_embedding: bool = False
    share_decoder_input_output_embed: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.decoder_embed_dim // self.decoder_attention_heads


@dataclass(frozen=True)
class TransformerXLConfig:
    """The shape of a Transformer-XL; fields are named as fairseq's and the original's options.

    What fairseq's example lets one choose has fairseq's defaults, and the rest is what fairseq fixes it to. The
    original (kimiyoung/transformer-xl, PyTorch) differs in `untie_r`, which it does not have: False there.

    Attributes:
        vocab_size: types of the dictionary.
        cutoffs: first type of each tail cluster of the adaptive embedding and softmax, rising; those at or above
            the vocabulary are dropped.
        adaptive: False for a plain embedding and softmax, whatever `cutoffs` says.
        d_model: width of the residual stream, an even number.
        d_embed: width of the first cluster's embedding; -1 is `d_model`.
        n_head: number of attention heads.
        d_head: width of one head; n_head * d_head need not be d_model.
        d_inner: width of the feed-forward layer.
        n_layer: number of layers.
        div_val: each cluster's embedding is this many times narrower than the one before.
        mem_len: positions that each layer remembers of earlier segments.
        ext_len: positions at the end of a segment that are left out of the memory, for segments that overlap.
        clamp_len: distances above it count as it; -1 does not clamp.
        same_length: each position attends to exactly the last `mem_len` positions, its own among them, instead of
            to more the later it stands in its segment.
        untie_r: each layer has its own r_w_bias and r_r_bias (the paper's u and v), else all share one pair.
        pre_lnorm: LayerNorm before each sublayer (there is none at the end), else after each.
        attn_type: 0 is Transformer-XL's attention; the original's baselines 1, 2 and 3 are not supported.
        not_tied: the softmax has matrices of its own, else it uses the embedding's.
        proj_share_all_but_first: the softmax uses the embedding's projections, except for the first cluster.
        dropout: on embeddings, positions, what each sublayer adds, the feed-forward's activation and the output.
        dropatt: on the attention weights.
        init: distribution of initial values, `normal` or `uniform`.
        init_std: deviation of `normal`.
        init_range: bound of `uniform`.
        proj_init_std: deviation of the clusters' projections, normal with either `init`.
        layer_norm_epsilon: added to the variance.
    """

    vocab_size: int
    cutoffs: tuple[int, ...] = (20000, 40000, 200000)
    adaptive: bool = True
    d_model: int = 500
    d_embed: int = -1
    n_head: int = 10
    d_head: int = 50
    d_inner: int = 1000
    n_layer: int = 12
    div_val: int = 1
    mem_len: int = 0
    ext_len: int = 0
    clamp_len: int = -1
    same_length: bool = False
    untie_r: bool = True
    pre_lnorm: bool = False
    attn_type: int = 0
    not_tied: bool = False
    proj_share_all_but_first: bool = True
    dropout: float = 0.0
    dropatt: float = 0.0
    init: Literal["normal", "uniform"] = "normal"
    init_std: float = 0.02
    init_range: float = 0.1
    proj_init_std: float = 0.01
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.attn_type != 0:
            raise ConfigError(
                f"--attn-type {self.attn_type}: only 0, the attention of Transformer-XL, is supported; 1, 2 and 3 are "
                "the original's baselines"
            )
        sizes = ("d_model", "n_head", "d_head", "d_inner", "n_layer", "div_val")
        for name, least in [*((size, 1) for size in sizes), ("mem_len", 0), ("ext_len", 0)]:
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')}: expected {least} or more, found {getattr(self, name)}")
        if self.d_model % 2:
            raise ConfigError(f"--d-model {self.d_model}: expected an even number, half of it sines and half cosines")
        if self.d_embed < 1 and self.d_embed != -1:
            raise ConfigError(f"--d-embed {self.d_embed}: expected 1 or more, or -1 for --d-model")
        if any(type(cutoff) is not int for cutoff in self.cutoffs):
            raise ConfigError(f"--cutoffs {','.join(map(str, self.cutoffs))}: expected whole numbers")
        if any(low >= high for low, high in zip((0, *self.cutoffs), self.cutoffs, strict=False)):
            raise ConfigError(f"--cutoffs {','.join(map(str, self.cutoffs))}: expected positive, rising numbers")
        if self.same_length and self.mem_len == 0:
            raise ConfigError("--same-length: attends to the last --mem-len positions, so --mem-len must be given")
        if self.embedding_dims[-1] == 0:
            raise ConfigError(
                f"--div-val {self.div_val}: leaves no width to the last of {len(self.cluster_bounds)} clusters, found "
                f"an embedding of {self.embedding_dims[0]}"
            )

    @property
    def cluster_bounds(self) -> list[tuple[int, int]]:
        """First type and end of each cluster; the first one is the softmax's shortlist."""
        cutoffs = [cutoff for cutoff in self.cutoffs if cutoff < self.vocab_size] if self.adaptive else []
        return list(zip([0, *cutoffs], [*cutoffs, self.vocab_size], strict=True))

    @property
    def embedding_dims(self) -> list[int]:
        """Width of each cluster's embedding."""
        widest = self.d_model if self.d_embed == -1 else self.d_embed
        return [widest // self.div_val**cluster for cluster in range(len(self.cluster_bounds))]


ModelConfig: TypeAlias = TransformerLMConfig | TransformerXLConfig


def transformer_xl(vocab_size: int, **overrides: Any) -> TransformerXLConfig:
    """fairseq's `transformer_xl`: 12 layers of 500, no memory until `mem_len` is given."""
    return TransformerXLConfig(vocab_size=vocab_size, **overrides)


def transformer_lm(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """fairseq's plain `transformer_lm`: post-norm, ReLU, untied."""
    return TransformerLMConfig(vocab_size=vocab_size, **overrides)


def transformer_lm_megatron(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """The 72-layer Megatron shape: d 3072, pre-norm, GELU, dropout 0.1 everywhere fairseq has it."""
    preset: dict[str, Any] = {
        "decoder_layers": 72,
        "decoder_embed_dim": 3072,
        "decoder_ffn_embed_dim": 3072 * 4,
        "decoder_attention_heads": 32,
        "activation_fn": "gelu",
        "decoder_normalize_before": True,
        "dropout": 0.1,
        "attention_dropout": 0.1,
    }
    return transformer_lm(vocab_size, **(preset | overrides))


def transformer_lm_megatron_11b(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """Megatron-11b: as `transformer_lm_megatron` with a feed-forward of 6 d."""
    return transformer_lm_megatron(vocab_size, **({"decoder_ffn_embed_dim": 3072 * 6} | overrides))


def transformer_lm_megatron_small(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """A Megatron shape for one GPU: 12 layers of 768, tied."""
    preset: dict[str, Any] = {
        "decoder_layers": 12,
        "decoder_embed_dim": 768,
        "decoder_ffn_embed_dim": 768 * 4,
        "decoder_attention_heads": 12,
        "share_decoder_input_output_embed": True,
    }
    return transformer_lm_megatron(vocab_size, **(preset | overrides))


def transformer_lm_megatron_tiny(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """A Megatron shape for a CPU: 4 layers of 256, tied."""
    preset: dict[str, Any] = {
        "decoder_layers": 4,
        "decoder_embed_dim": 256,
        "decoder_ffn_embed_dim": 256 * 4,
        "decoder_attention_heads": 8,
        "share_decoder_input_output_embed": True,
    }
    return transformer_lm_megatron(vocab_size, **(preset | overrides))


def transformer_lm_big(vocab_size: int, **overrides: Any) -> TransformerLMConfig:
    """fairseq's `transformer_lm_big`: 12 layers of 1024, pre-norm as all of fairseq's named presets, ReLU, untied."""
    preset: dict[str, Any] = {
        "decoder_layers": 12,
        "decoder_embed_dim": 1024,
        "decoder_ffn_embed_dim": 4096,
        "decoder_attention_heads": 16,
        "decoder_normalize_before": True,
    }
    return transformer_lm(vocab_size, **(preset | overrides))


def transformer_lm_gpt(
    vocab_size: int, *, layers: int = 12, embed_dim: int = 768, heads: int = 12, **overrides: Any
) -> TransformerLMConfig:
    """fairseq's `transformer_lm_gpt`, and in other sizes its `transformer_lm_gpt2_*`: sinusoidal positions, untied."""
    preset: dict[str, Any] = {
        "decoder_layers": layers,
        "decoder_embed_dim": embed_dim,
        "decoder_ffn_embed_dim": 4 * embed_dim,
        "decoder_attention_heads": heads,
        "activation_fn": "gelu",
        "attention_dropout": 0.1,
    }
    return transformer_lm_big(vocab_size, **(preset | overrides))


def transformer_lm_gpt3(
    vocab_size: int, *, layers: int, embed_dim: int, heads: int, **overrides: Any
) -> TransformerLMConfig:
    """fairseq's `transformer_lm_gpt3_*`: learned positions, tied, no dropout."""
    preset: dict[str, Any] = {
        "decoder_learned_pos": True,
        "share_decoder_input_output_embed": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return transformer_lm_gpt(vocab_size, layers=layers, embed_dim=embed_dim, heads=heads, **(preset | overrides))


ARCHITECTURES: dict[str, Callable[..., ModelConfig]] = {
    "transformer_lm": transformer_lm,
    "transformer_lm_big": transformer_lm_big,
    "transformer_lm_gpt": transformer_lm_gpt,
    "transformer_lm_gpt2_small": partial(transformer_lm_gpt, layers=24, embed_dim=1024, heads=16),
    "transformer_lm_gpt2_medium": partial(transformer_lm_gpt, layers=36, embed_dim=1280, heads=20),
    "transformer_lm_gpt2_big": partial(transformer_lm_gpt, layers=48, embed_dim=1600, heads=25),
    "transformer_lm_gpt3_small": partial(transformer_lm_gpt3, layers=12, embed_dim=768, heads=12),
    "transformer_lm_gpt3_medium": partial(transformer_lm_gpt3, layers=24, embed_dim=1024, heads=16),
    "transformer_lm_gpt3_large": partial(transformer_lm_gpt3, layers=24, embed_dim=1536, heads=16),
    "transformer_lm_gpt3_xl": partial(transformer_lm_gpt3, layers=24, embed_dim=2048, heads=32),
    "transformer_lm_gpt3_2_7": partial(transformer_lm_gpt3, layers=32, embed_dim=2560, heads=32),
    "transformer_lm_gpt3_6_7": partial(transformer_lm_gpt3, layers=32, embed_dim=4096, heads=32),
    "transformer_lm_gpt3_13": partial(transformer_lm_gpt3, layers=40, embed_dim=5120, heads=40),
    "transformer_lm_gpt3_175": partial(transformer_lm_gpt3, layers=96, embed_dim=12288, heads=96),
    "transformer_lm_megatron": transformer_lm_megatron,
    "transformer_lm_megatron_11b": transformer_lm_megatron_11b,
    "transformer_lm_megatron_small": transformer_lm_megatron_small,
    "transformer_lm_megatron_tiny": transformer_lm_megatron_tiny,
    "transformer_xl": transformer_xl,
}
