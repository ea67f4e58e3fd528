"""`lmtools plan`: numbers for a person and for programs, from options of a run."""

from __future__ import annotations

import json

import pytest

ELEVEN = ["plan", "--arch", "transformer_lm_megatron_11b", "--mp", 8]


def test_training_of_megatron_11b(lmtools):
    ran = lmtools(*ELEVEN, "--dp", 4, "--gpu-memory", 32, "--json")
    assert (ran.code, ran.err) == (0, "")
    plan = json.loads(ran.out)
    assert (plan["parameters"], plan["parameters_on_rank"]) == (11_032_246_272, 1_380_197_376)
    memory = plan["memory"]
    assert memory["weights"] == memory["gradients"] == 4 * 1_380_197_376
    assert memory["total"] == sum(value for name, value in memory.items() if name not in ("total", "host"))
    assert plan["fits"] is (memory["total"] <= 32 << 30)
    assert {(row["axis"], row["kind"]) for row in plan["traffic"]} == {("tp", "all-reduce"), ("dp", "all-reduce")}
    assert (plan["tokens_in_update"], plan["time"]) == (4 * 1024, None)


UNTIED = 11_032_246_272 + 51_200 * 3072
SHARE = "--share-decoder-input-output-embed"


@pytest.mark.parametrize(
    ("options", "parameters", "assumed", "said"),
    [
        ([], 11_032_246_272, True, f"tied to the embedding, which is assumed; --no-{SHARE[2:]} if it is not"),
        ([SHARE], 11_032_246_272, False, "tied to the embedding"),
        ([f"--no-{SHARE[2:]}"], UNTIED, False, "untied, a matrix of its own"),
    ],
)
@pytest.mark.parametrize("task", [[], ["--eval"]])
def test_it_says_whether_the_output_projection_is_tied_and_whether_that_was_assumed(
    lmtools, options, parameters, assumed, said, task
):
    plan = json.loads(lmtools(*ELEVEN, *options, *task, "--json").out)
    assert plan["parameters"] == parameters
    assert plan["share_decoder_input_output_embed"] is (parameters < UNTIED)
    assert plan["assumed"] == (["share_decoder_input_output_embed"] if assumed else [])
    parameters_line, output_line, *_ = lmtools(*ELEVEN, *options, *task).out.splitlines()
    assert f"{parameters:,}" in parameters_line
    assert output_line == f"output projection      {said}"


def test_what_the_preset_or_the_file_says_is_not_assumed(lmtools, tmp_path):
    tiny = json.loads(lmtools("plan", "--arch", "transformer_lm_megatron_tiny", "--json").out)
    assert (tiny["share_decoder_input_output_embed"], tiny["assumed"]) == (True, [])
    (tmp_path / "run.toml").write_text('arch = "transformer_lm_megatron"\nbatch_size = 1\nmax_update = 5\n')
    as_run = json.loads(lmtools("plan", "--config", tmp_path / "run.toml", "--json").out)
    assert (as_run["share_decoder_input_output_embed"], as_run["assumed"]) == (False, [])


XL = ["plan", "--arch", "transformer_xl", "--n-layer", 16, "--d-model", 410, "--n-head", 10, "--d-head", 41]
XL += ["--d-inner", 2100]


def test_training_of_a_transformer_xl(lmtools):
    options = [*XL, "--mem-len", 150, "--tokens-per-sample", 150, "--batch-size", 15, "--dropout", 0.1, "--fp16"]
    ran = lmtools(*options, "--dp", 4, "--json")
    assert (ran.code, ran.err) == (0, "")
    plan = json.loads(ran.out)
    assert (plan["parameters"], plan["tokens_in_update"]) == (151_123_537, 4 * 15 * 150)
    assert plan["clusters"] == [20_000, 20_000, 160_000, 67_744]
    narrow = json.loads(lmtools(*options, "--cutoffs", "20000,60000", "--div-val", 4, "--json").out)
    assert narrow["clusters"] == [20_000, 40_000, 207_744]
    assert narrow["parameters"] < plan["parameters"] / 2
    split = json.loads(lmtools(*options, "--mp", 2, "--json").out)
    assert split["parameters_on_rank"] < plan["parameters"] * 0.51
    assert [(row["axis"], row["kind"], row["count"]) for row in split["traffic"]] == [("tp", "all-reduce", 8 + 4 * 16)]


def test_evaluation_of_a_transformer_xl(lmtools):
    options = [*XL, "--eval", "--num-tokens", 245_569, "--tokens-per-sample", 64, "--mem-len", 640]
    ran = lmtools(*options, "--dtype", "float32")
    assert (ran.code, ran.err) == (0, "")
    assert "chunks                 3,838 for 245,569 tokens, 245,569 read" in ran.out
    more = json.loads(lmtools(*options, "--batch-size", 10, "--json").out)
    assert more["activations"] > 8 * json.loads(lmtools(*options, "--json").out)["activations"]


def test_a_configuration_file_of_a_transformer_xl(lmtools, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('arch = "transformer_xl"\ntask = "truncated_bptt_lm"\nbatch_size = 1\nmax_update = 5\n')
    plan = json.loads(lmtools("plan", "--config", file, "--vocab-size", 1000, "--json").out)
    assert plan["clusters"] == [1000]


@pytest.mark.parametrize(("gib", "verdict"), [(32, "fits in 32 GiB"), (16, "does NOT fit in 16 GiB")])
def test_says_whether_it_fits(lmtools, gib, verdict):
    ran = lmtools(*ELEVEN, "--dp", 4, "--fp16", "--gpu-memory", gib)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1] == verdict


def test_time_is_work_and_traffic_at_the_given_speeds(lmtools):
    speeds = ["--flops", 100e12, "--utilisation", 0.5, "--link-bandwidth", 10e9]
    plan = json.loads(lmtools(*ELEVEN, "--fp16", *speeds, "--json").out)
    assert plan["time"]["compute_seconds"] == pytest.approx(plan["flops_in_update"] / 50e12)
    sent = sum(row["sent_bytes"] for row in plan["traffic"])
    assert plan["time"]["communication_seconds"] == pytest.approx(sent / 10e9)
    ran = lmtools(*ELEVEN, "--fp16", *speeds)
    assert "at 50 % of 1e+14 FLOP/s" in ran.out


def test_more_ranks_and_less_precision_take_less_memory(lmtools):
    def total(*options: object) -> int:
        memory: dict[str, int] = json.loads(lmtools(*ELEVEN, "--dp", 4, *options, "--json").out)["memory"]
        return memory["total"]

    assert total("--zero", 3) < total("--zero", 2) < total()
    assert total("--checkpoint-activations") < total("--sequence-parallel") < total()
    assert total("--offload-activations") < total("--checkpoint-activations")
    assert total("--memory-efficient-fp16") < total("--fp16") < total()


def test_what_is_offloaded_is_listed_apart(lmtools):
    """72 inputs of blocks, 1024 x 3072 in float16 each."""
    ran = lmtools(*ELEVEN, "--fp16", "--offload-activations")
    assert (ran.code, ran.err) == (0, "")
    assert "  on the host               0.422 GiB\n" in ran.out
    assert "on the host" not in lmtools(*ELEVEN, "--fp16", "--checkpoint-activations").out


def test_an_evaluation(lmtools):
    options = ["--eval", "--num-tokens", 270_847, "--tokens-per-sample", 1024, "--context-window", 992]
    ran = lmtools(*ELEVEN, *options, "--flops", 125e12, "--gpu-memory", 16, "--json")
    plan = json.loads(ran.out)
    assert (plan["task"], plan["num_windows"], plan["fits"]) == ("eval", 8464, True)
    assert plan["memory"] == plan["weights"] + plan["activations"]
    assert plan["hours"] == pytest.approx(plan["flops"] / (8 * 0.4 * 125e12) / 3600)
    ran = lmtools(*ELEVEN, *options, "--flops", 125e12)
    assert "8,464 for 270,847 tokens" in ran.out


def test_what_a_transformer_xl_reads_again_is_counted(lmtools):
    shape = ["--arch", "transformer_xl", "--n-layer", 2, "--mem-len", 64, "--tokens-per-sample", 32, "--json"]
    options = {"--eval": ["--eval", "--num-tokens", 3200], "train": []}
    for task, given in options.items():
        once, again = (json.loads(lmtools("plan", *shape, *given, "--ext-len", ext_len).out) for ext_len in (0, 32))
        if task == "--eval":
            assert (once["tokens_read"], again["tokens_read"]) == (3200, 6400)
            assert again["activations"] > once["activations"]
            assert again["flops"] > once["flops"]
        else:
            assert again["tokens_in_update"] == once["tokens_in_update"] == 32
            assert again["memory"]["activations"] > once["memory"]["activations"]
            assert again["flops_in_update"] > once["flops_in_update"]


def test_a_configuration_file_is_planned_as_it_would_be_run(lmtools, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('arch = "transformer_lm_megatron_tiny"\nbatch_size = 3\nmax_update = 5\nmp = 2\nbf16 = true\n')
    plan = json.loads(lmtools("plan", "--config", file, "--vocab-size", 1000, "--mp", 4, "--json").out)
    assert (plan["batch_size"], plan["dtype"]) == (3, "bfloat16")
    assert plan["parameters"] / 4 < plan["parameters_on_rank"] < plan["parameters"] / 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "megatron"], "--arch megatron: expected one of transformer_lm, "),
        ([*ELEVEN[1:3], "--mp", 5], "--mp 5: does not divide the model's 32 attention heads"),
        ([*ELEVEN[1:3], "--mp", 16, "--vocab-size", 7], "--mp 16: leaves a rank without any of the vocabulary of 7"),
        ([*ELEVEN[1:3], "--zero", 1], "--zero: "),
        (
            ["--arch", "transformer_xl", "--eval", "--context-window", 9],
            "--context-window: a stream has a memory instead",
        ),
        (["--arch", "transformer_xl", "--cutoffs", "9,x"], "--cutoffs 9,x: expected whole numbers"),
        (
            ["--arch", "transformer_xl", "--decoder-layers", 9],
            "--decoder-layers: is no option of --arch transformer_xl",
        ),
        ([*ELEVEN[1:3], "--num-tokens", 5], "--num-tokens: is of an evaluation; give --eval"),
        ([*ELEVEN[1:3], "--context-window", 5], "--context-window: is of an evaluation; give --eval"),
        ([*ELEVEN[1:3], "--dtype", "bfloat16"], "--dtype: is of an evaluation; give --eval"),
        ([*ELEVEN[1:3], "--link-bandwidth", 1e9], "--link-bandwidth: an estimate of time needs --flops too"),
    ],
)
def test_what_cannot_be_planned_is_a_line(lmtools, options, message):
    ran = lmtools("plan", *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"lmtools: {message}")
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("option", ["--gpu-memory", "--flops", "--link-bandwidth"])
def test_what_no_device_has_is_no_number_to_plan_with(lmtools, option):
    flops = [] if option == "--flops" else ["--flops", 1e12]
    ran = lmtools("plan", "--arch", "transformer_lm", *flops, option, "inf")
    assert (ran.code, ran.out) == (2, "")
    assert f"Invalid value for '{option}'" in ran.err
