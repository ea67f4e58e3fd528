"""Recipes as files: what they hold, how names are filled in, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from lmtools.cli import app
from lmtools.cli.reproduce import ask_plan
from lmtools.errors import ConfigError, DataError, LmtoolsError
from lmtools.recipes.needs import needs_of
from lmtools.recipes.outcome import compare, table
from lmtools.recipes.recipe import Result, find_recipe, read_recipe, recipe_names, results_of, steps_of

SMALL = """
description = "d"
splits = ["test", "valid"]
[values]
raw = "wiki.{split}.raw"
mp = 8
[[stages]]
name = "text"
run = "lmtools download wikitext-2-raw"
unless = "raw"
[[stages]]
name = "detok"
run = "lmtools detok {raw} '{split} {mp}.detok'"
makes = ["{split} {mp}.detok"]
[[stages]]
name = "own"
run = "lmtools plot"
when = "mp"
[[results]]
what = "w"
file = "x.json"
key = "a.b"
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "my.toml").write_text(text)
        return tmp_path / "my.toml"

    return write


@pytest.mark.parametrize("name", recipe_names())
def test_own_recipes_are_commands_that_exist(name):
    """Each is parsed with its own options, and every result is in a file that a stage makes."""
    recipe = read_recipe(find_recipe(name))
    for given in ({}, {"checkpoint": "c"}, {"raw": "r", "checkpoint": "c", "srcdict": "d"}):
        steps = steps_of(recipe, given)
        for step in steps:
            for command, *arguments in filter(None, (step.argv, step.plan)):
                typer.main.get_command(app).get_command(None, command).make_context(command, arguments)
        assert {result.file for result in recipe.results} <= {name for step in steps for name in step.makes}


def test_stages_are_run_for_each_split_whose_name_they_use(written):
    """A value may name another, an argument keeps its spaces, and what depends on a value that was given is chosen."""
    recipe = read_recipe(written(SMALL))
    assert [(step.name, step.argv, step.makes) for step in steps_of(recipe, {})] == [
        ("text", ("download", "wikitext-2-raw"), ()),
        ("detok test", ("detok", "wiki.test.raw", "test 8.detok"), ("test 8.detok",)),
        ("detok valid", ("detok", "wiki.valid.raw", "valid 8.detok"), ("valid 8.detok",)),
    ]
    steps = steps_of(recipe, {"raw": "/my text", "mp": 2}, splits=["test"])
    assert [step.command for step in steps] == ["lmtools detok '/my text' 'test 2.detok'", "lmtools plot"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("unless", "unles", "stages.0.unles: recipes have no such key; nearest is unless"),
        ('description = "d"\n', "", "description: field required"),
        ("lmtools plot", "rm -r x", "stage own: expected `lmtools ...`, found 'rm -r x'"),
        ('when = "mp"', 'when = "dp"', "stage own: 'dp' is not one of its values"),
        ('run = "lmtools plot"', 'run = "lmtools plot \'x"', 'stage own: no closing quotation in "lmtools plot \'x"'),
        (
            "unless =",
            'plan = "lmtools eval"\nunless =',
            "stage text: expected `lmtools plan ...`, found 'lmtools eval'",
        ),
        ('splits = ["test", "valid"]', "splits = 3", "splits: input should be a valid list"),
    ],
)
def test_faults_of_a_recipe_are_one_line(written, old, new, message):
    path = written(SMALL.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert str(caught.value) == f"{path}: {message}"


def test_names_without_a_value_are_refused(written):
    with pytest.raises(ConfigError, match=r"stage detok: \{mq\} has no value"):
        steps_of(read_recipe(written(SMALL.replace("'{split} {mp}", "'{split} {mq}"))), {})
    with pytest.raises(ConfigError, match=r"stage detok: \{raw\} has no value"):
        steps_of(read_recipe(written(SMALL.replace("wiki.{split}.raw", "{raw}"))), {}, splits=["test"])
    with pytest.raises(ConfigError, match="mq: is not a value of the recipe; nearest is mp"):
        steps_of(read_recipe(written(SMALL)), {"mq": 3})


def test_a_split_may_have_values_of_its_own(written):
    """They come before the others and after what the user gives; hours of an evaluation are by its split's tokens."""
    recipe = read_recipe(written(SMALL.replace("[[stages]]", "[values_of.valid]\nmp = 4\nd = 2\n[[stages]]", 1)))
    assert [step.argv[2] for step in steps_of(recipe, {})[1:]] == ["test 8.detok", "valid 4.detok"]
    assert [step.argv[2] for step in steps_of(recipe, {"mp": 1})[1:3]] == ["test 1.detok", "valid 1.detok"]
    with pytest.raises(ConfigError, match="e: is not a value of the recipe; nearest is "):
        steps_of(recipe, {"e": 1})
    path = written(SMALL.replace("[[stages]]", "[values_of.train]\nmp = 4\n[[stages]]", 1))
    with pytest.raises(ConfigError, match=r"my.toml: values_of.train: splits are test, valid$"):
        read_recipe(path)

    plans = [step.plan for step in steps_of(read_recipe(find_recipe("megatron-11b")), {}) if step.plan]
    assert [plan[plan.index("--num-tokens") + 1] for plan in plans] == ["270847", "237000"]


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="megatron-11: is not a recipe; did you mean megatron-11b"):
        find_recipe("megatron-11")


def test_one_split_has_its_own_results_alone():
    recipe = read_recipe(find_recipe("megatron-11b"))
    rows = results_of(recipe, steps_of(recipe, {"raw": "my.raw"}, splits=["test"]))
    assert {row.file for row in rows} == {"test.json", "test.renorm.json"}


def test_published_beside_obtained(tmp_path):
    (tmp_path / "r.json").write_text('{"a": {"b": 10.5398}, "n": 245569, "none": null}')
    results = [
        Result(what="perplexity", published=10.54, file="r.json", key="a.b", note="not shown: it is the same number"),
        Result(what="tokens", published=245_566, file="r.json", key="n", note="another way to count"),
        Result(what="unpublished", file="r.json", key="n"),
    ]
    rows = compare(results[1:], tmp_path)
    assert [row.difference for row in rows] == [3, None]
    assert table(rows) == (
        "             published  obtained  difference\n"
        "tokens         245,566   245,569          +3 [1]\n"
        "unpublished              245,569\n"
        "[1] another way to count"
    )
    [row] = compare(results[:1], tmp_path)
    assert row.difference == pytest.approx(-0.0002)
    for key in ("none", "missing.too"):
        with pytest.raises(DataError, match=f"{key} is None, expected a number"):
            compare([Result(what="w", file="r.json", key=key)], tmp_path)


def test_needs_of_a_download_are_in_the_table_of_artifacts(written):
    text, detok, _ = steps_of(read_recipe(written(SMALL)), {})
    nothing = {"download_bytes": None, "disk_bytes": None, "memory_bytes": None, "hours": None}
    assert needs_of(text, unasked) == nothing | {"download_bytes": 4_721_645, "disk_bytes": 13_378_183}
    assert needs_of(detok, unasked) == nothing


def unasked(argv):
    raise AssertionError(f"it has no plan, but was asked {argv}")


def test_needs_of_a_planned_stage_are_what_the_plan_says():
    """Float32 parameters of Megatron-11b, an eighth on each rank, and what is computed with them."""
    steps = steps_of(read_recipe(find_recipe("megatron-11b")), {"flops": 1e13})
    [evaluation] = [step for step in steps if step.name == "eval test"]
    needs = needs_of(evaluation, ask_plan)
    assert 4 * 1_380_197_376 < needs["memory_bytes"] < 4.5 * 1_380_197_376
    again = needs_of(replace(evaluation, plan=(*evaluation.plan[:-1], "2e13")), ask_plan)
    assert again["hours"] == pytest.approx(needs["hours"] / 2)


def test_hours_of_a_training_are_those_of_all_its_updates():
    """4 replicas of 15 streams of 150 tokens, 200,000 times; a third of the work of a token is that of reading it."""
    recipe = read_recipe(find_recipe("transformer-xl"))
    [train] = [step for step in steps_of(recipe, {"flops": 1e13}) if step.name == "train"]
    needs = needs_of(train, ask_plan)
    block = 2 * (4 * 410 * 410 + 2 * 410 * 2100 + 410 * 3 * (150 + 150 / 2))  # attention: content, position, values
    blocks, shortlist = 16 * (block + 2 * 2 * 410 * 410), 2 * 410 * 20_003  # of 300 positions for 150 tokens
    at_least = 3 * (blocks + shortlist) * 15 * 150 * 200_000 / (1e13 * 0.4) / 3600  # without the rarer words
    assert at_least < needs["hours"] < 1.2 * at_least
    assert needs["memory_bytes"] > 16 * 151_123_537, "float16, a float32 copy, and Adam's two"
    [short] = [step for step in steps_of(recipe, {"flops": 1e13, "max_update": 50_000}) if step.name == "train"]
    assert needs_of(short, ask_plan)["hours"] == pytest.approx(needs["hours"] / 4)
    assert short.argv[short.argv.index("--max-update") + 1] == "50000"


@pytest.mark.parametrize(
    ("argv", "said"),
    [(("plan", "--eval", "--arch", "none"), r"plan --eval --arch none: .*none"), (("plan", "--x"), r"plan --x: .*--x")],
)
def test_a_plan_that_cannot_be_made_is_one_line(argv, said):
    with pytest.raises(LmtoolsError, match=rf"^lmtools {said}") as caught:
        ask_plan(argv)
    assert "\n" not in str(caught.value)
