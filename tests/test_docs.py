"""What the documentation shows is so: blocks run or are understood, links lead somewhere, the tree is the tree.

Every fenced block says what it is:

    sh      is run here, with python, in the order of the page, on small files
    python  is run too
    bash    cannot be run here (gigabytes to download, several machines, GPUs, another program): each command in it is
            read by the parser of its own program
    yaml    is read, and what it starts is read by its parser
    text    is no input: a tree, a formula, output; directly after `sh` it is what that prints
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from packaging.requirements import Requirement

from lmtools.cli import app
from lmtools.cli.commands import COMMANDS
from lmtools.train.config_toml import read_toml
from tests.support.documents import (
    PAGES,
    REPOSITORY,
    blocks,
    commands,
    fenced,
    lay_out_models,
    lay_out_run,
    lay_out_text,
    run_block,
    run_python,
)

CLUSTERS = REPOSITORY / "docs" / "clusters.md"
KINDS = {"sh", "python", "bash", "yaml", "text"}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@by_page
def test_every_block_says_what_it_is(page):
    """And none escapes: not by its indentation, not by another fence, not as `text` that somebody would type."""
    text = page.read_text(encoding="utf-8")
    assert {language for language, _ in fenced(page)} <= KINDS
    assert len(re.findall(r"^\s*(?:```|~~~)", text, flags=re.MULTILINE)) == 2 * len(fenced(page))
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"(?:\A|\n)\n(?:    |\t).*", outside) == []
    assert "<pre" not in outside
    typed = re.compile(rf"(\$|lmtools|python|pip|make|torchrun|dask|cat|{'|'.join(FAIRSEQ)}) ")
    assert [line for shown in blocks(page, "text") for line in shown.splitlines() if typed.match(line)] == []


@by_page
def test_every_command_is_understood(page):
    """By its program's own parser, where that is here: options exist and take these values. Nothing is run."""
    for language, script in fenced(page):
        if language in ("sh", "bash"):
            checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
            assert (checked.returncode, checked.stderr) == (0, "")
            for command in commands(script):
                understand(command)
        elif language == "python":
            ast.parse(script)


SHELL = {"set", "trap", "cat"}
FAIRSEQ = {"fairseq-preprocess", "fairseq-eval-lm", "fairseq-train"}
"""fairseq itself parses these in tests/parity/test_documents.py."""
OLD_MODULES = {"examples.megatron_11b.detok", "examples.roberta.multiprocessing_bpe_encoder"}
"""fairseq's too: tests/parity/test_crosscheck.py runs them."""


def understand(command: list[str]) -> None:
    """Have a command parsed.

    Raises:
        Exception: its parser refuses it, or there is none for it.
    """
    program, *arguments = (re.sub(r"\$\{?SLURM_\w+\}?", "2", word) for word in command)
    if program in SHELL or program in FAIRSEQ:
        return
    if program == "srun":
        understand(arguments)
    elif program == "lmtools":
        understand_lmtools(arguments)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(arguments)
        assert (options.module, options.training_script) == (True, "lmtools")
        understand_lmtools(options.training_script_args)
    elif program == "dask":
        understand_dask(*arguments)
    elif program == "pip":
        understand_pip(*arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
        assert arguments
        assert set(arguments) <= set(targets)
    elif Path(program).name == "python" and arguments[0] == "-m":
        understand_module(*arguments[1:])
    else:
        pytest.fail(f"nobody parses {command}")


def understand_lmtools(arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    name, *rest = arguments
    if name.startswith("-"):
        assert name in {flag for option in group.params for flag in option.opts}
        assert rest == []
    else:
        command = group.get_command(None, name)
        context = command.make_context(name, rest)
        if name == "train":  # whose options must go together, too
            context.params["print_config"] = True
            command.invoke(context)


def understand_dask(name: str, *arguments: str) -> None:
    from distributed.cli import dask_scheduler, dask_worker

    {"scheduler": dask_scheduler, "worker": dask_worker}[name].main.make_context(name, list(arguments))


def understand_pip(install: str, wanted: str) -> None:
    assert install == "install"
    if wanted != ".":
        requirement = Requirement(wanted)
        project = read_toml(REPOSITORY / "pyproject.toml")["project"]
        assert requirement.name == project["name"]
        assert requirement.extras <= set(project["optional-dependencies"])


def understand_module(module: str, *arguments: str) -> None:
    if module == "pytest":
        pytest.Config.fromdictargs({}, list(arguments))
    elif module == "lmtools.harness":  # the harness has the parser of all but this
        harness = ast.parse((REPOSITORY / "lmtools" / "harness.py").read_text(encoding="utf-8"))
        [init] = [node for node in ast.walk(harness) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        parser = argparse.ArgumentParser(exit_on_error=False)
        parser.add_argument("command", choices=["run"])
        parser.add_argument("--model", choices=["lmtools"])
        parser.add_argument("--tasks")
        parser.add_argument("--model_args")
        given = parser.parse_args(arguments).model_args
        assert {pair.partition("=")[0] for pair in given.split(",")} <= {argument.arg for argument in init.args.args}
    else:
        assert module in OLD_MODULES, module


# What imports no torch, or only looks at the command line.
QUICK = {"detok", "bpe-encode", "bpe-decode", "binarize", "renorm-ppl", "--install-completion", "--show-completion"}


def is_quick(page: Path) -> bool:
    """Whether what a page runs takes a second or two."""
    run = [command for block in blocks(page, "sh") for command in commands(block)]
    return {command[1] for command in run} <= QUICK and not blocks(page, "python")


@pytest.mark.timeout(1200)  # README alone starts twenty commands that load torch
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=() if is_quick(page) else pytest.mark.slow)
        for page in PAGES
        if blocks(page, "sh") or blocks(page, "python")
    ],
)
def test_every_block_of_a_page_runs(page, golden, tmp_path):
    """In one folder for the whole page, in order, under the names that the documentation uses."""
    lay_out_text(tmp_path, golden)
    if page.name == "report.md":
        lay_out_run(tmp_path)
    elif page.name == "training.md":
        (tmp_path / "other-run").symlink_to(tmp_path / "run")
    elif not is_quick(page):
        lay_out_models(tmp_path, golden)
    text = page.read_text(encoding="utf-8")
    for language, block in fenced(page):
        if language == "sh":
            printed = run_block(block, tmp_path)
            _, directly_after, rest = text.partition(f"{block}```\n\n```text\n")
            assert not directly_after or printed == rest.partition("```\n")[0]
        elif language == "python":
            run_python(block, tmp_path)


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


def test_readme_lists_every_command():
    """With what --help says of it."""
    listed = re.findall(r"^\| \[`([a-z-]+)`\]\(\S+\) \| (.+) \|$", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert listed == [(name, command.says) for name, command in COMMANDS.items() if command.says]


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


def test_examples_for_slurm_are_jobs():
    """Which begin with options that sbatch has; what they run is parsed with all other commands."""
    jobs = [script for script in blocks(CLUSTERS, "bash") if script.startswith("#!")]
    assert len(jobs) == 2
    known = ["job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue"]
    for job in jobs:
        options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", job, flags=re.MULTILINE)
        assert len(options) == job.count("#SBATCH") >= 4
        assert {name for name, _ in options} <= set(known)


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
