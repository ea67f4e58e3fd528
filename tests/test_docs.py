"""What the documentation shows is so: commands are understood, links lead somewhere, the tree is the tree.

Blocks marked `sh` are also run: those of README.md in test_pipeline.py, those of other pages here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from lmtools.cli import app
from tests.support.documents import PAGES, REPOSITORY, blocks, lmtools_commands, run_block

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@by_page
def test_every_command_is_understood(page):
    """Command and options exist and take these values; nothing is run."""
    group = typer.main.get_command(app)
    for name, *arguments in lmtools_commands(page):
        group.get_command(None, name).make_context(name, arguments)


@by_page
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            linked = (page.parent / path) if path else page
            assert linked.exists(), target
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
