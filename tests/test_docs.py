"""What the documentation shows is so: commands are understood, links lead somewhere, the tree is the tree.

Blocks marked `sh` are also run: those of README.md in test_pipeline.py, those of other pages here.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from lmtools.cli import app
from tests.support.documents import PAGES, REPOSITORY, blocks, lmtools_commands, run_block

CLUSTERS = REPOSITORY / "docs" / "clusters.md"

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@by_page
def test_every_command_is_understood(page):
    """Command and options exist and take these values; nothing is run."""
    group = typer.main.get_command(app)
    for name, *arguments in lmtools_commands(page):
        if name.startswith("-"):
            assert name in {flag for option in group.params for flag in option.opts}
            continue
        group.get_command(None, name).make_context(name, arguments)


@by_page
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            linked = (page.parent / path) if path else page
            assert linked.exists(), target
            of_the_site = page.parent == CLUSTERS.parent
            assert not of_the_site or linked.resolve().is_relative_to(page.parent), f"{target}: is not on the site"
            assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """The names by which headings can be linked, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    shown = {name for block in blocks(page) for name in re.findall(r"^make ([a-z-]+)", block, flags=re.MULTILINE)}
    assert shown
    assert shown <= targets


def test_architecture_shows_the_tree_as_it_is():
    """Every module that is named exists, and every package and top-level module is named."""
    [tree, *_] = blocks(REPOSITORY / "docs" / "architecture.md")
    named = set()
    folder = Path()
    for line in tree.splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        folder = Path(name) if depth == 0 else Path("lmtools", name) if depth == 2 and name.endswith("/") else folder
        named.add(folder if name.endswith("/") else (folder if depth == 4 else Path("lmtools")) / name)
    assert [path for path in named if not (REPOSITORY / path).exists()] == []
    there = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "lmtools").iterdir()}
    assert {path for path in there if not path.name.startswith(("_", "py.typed"))} <= named


def test_every_page_is_in_the_menu():
    menu = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [page.name for page in PAGES if page.parent.name == "docs"]
    assert sorted(re.findall(r"\S+\.md", menu)) == sorted(pages)


def test_every_message_of_troubleshooting_is_one_that_lmtools_has():
    page = REPOSITORY / "docs" / "troubleshooting.md"
    shown = re.findall(r"^### `(.+)`$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(shown) > 30
    messages = set().union(*map(strings, (REPOSITORY / "lmtools").rglob("*.py")))
    assert [fragment for fragment in shown if not any(fragment in message for message in messages)] == []


def strings(module: Path) -> set[str]:
    """The strings of a module, with `…` for what is filled in."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.add("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_the_table_of_scale_is_the_benchmark_s():
    measured = (REPOSITORY / "benchmarks" / "results" / "scale.md").read_text(encoding="utf-8")
    table = [line for line in measured.splitlines() if line.startswith("|")]
    assert len(table) == 5
    assert "\n".join(table) in (REPOSITORY / "docs" / "scale.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", blocks(CLUSTERS, "bash"), ids=["train", "text"])
def test_examples_for_slurm_are_shell(script):
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert script.startswith("#!/bin/bash\n#SBATCH ")


def test_the_example_for_kubernetes_is_a_job_whose_command_is_understood():
    [example] = blocks(CLUSTERS, "yaml")
    job = yaml.safe_load(example)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    world_size = int(job["spec"]["nprocPerNode"]) * sum(replica["replicas"] for replica in replicas.values())
    for replica in replicas.values():
        [container] = replica["template"]["spec"]["containers"]
        volumes = {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        torchrun, dash_m, lmtools, name, *arguments = [*container["command"], *container["args"]]
        assert (torchrun, dash_m, lmtools, name) == ("torchrun", "-m", "lmtools", "train")
        assert {type(argument) for argument in arguments} == {str}
        options = typer.main.get_command(app).get_command(None, name).make_context(name, list(arguments)).params
        assert options["mp"] * options["dp"] == world_size


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.name)
def test_every_block_marked_sh_runs(page, golden, tmp_path):
    """In one folder for the whole page, in order, on a small text under the names that the documentation uses."""
    text = (golden / "train.txt").read_bytes()
    for name in ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw", "wiki.train.tokens", "wiki.valid.tokens"):
        (tmp_path / name).write_bytes(text)
    for name in ("wiki.test.bpe", "a.txt", "b.txt"):
        (tmp_path / name).write_bytes((golden / "train.bpe").read_bytes())
    (tmp_path / "dict.txt").write_text("".join(f"{token} 1\n" for token in range(50257)))
    for block in blocks(page, "sh"):
        run_block(block, tmp_path)
