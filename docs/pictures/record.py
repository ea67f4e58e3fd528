"""Run `lmtools quickstart` in a terminal of 100 columns, and draw what stands there at the end as SVG.

    python docs/pictures/record.py FOLDER PICTURE.svg

It runs in FOLDER, and makes FOLDER/quickstart. Needs tmux, which is the terminal: what a progress bar wrote over is not
in the picture. The text stages at the beginning, and the list of files at the end, are left out.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 50
FIRST_SHOWN = re.compile(r"^\$ lmtools train ")
LAST_SHOWN = re.compile(r"^# done in ")


def record(command: str, cwd: Path) -> list[str]:
    """Run a command in a terminal; returns the lines that it left there, with their colours as escape sequences.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="lmtools-record-") as name:
        exit_code = Path(name, "exit-code")
        shown = f"printf '$ %s\\n' {shlex.quote(command)}; {command}; echo $? > {exit_code}; tmux wait-for -S done; cat"
        tmux = ["tmux", "-S", str(Path(name, "socket")), "-f", "/dev/null"]
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        start = [*tmux, "start-server", ";", "set-option", "-g", "history-limit", "5000", ";"]
        try:
            subprocess.run([*start, "new-session", "-d", *size, "-c", str(cwd), "bash", "-c", shown], check=True)
            subprocess.run([*tmux, "wait-for", "done"], check=True)
            captured = subprocess.run(
                [*tmux, "capture-pane", "-p", "-e", "-S", "-"], check=True, stdout=subprocess.PIPE, text=True
            )
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)
        lines = captured.stdout.rstrip("\n").split("\n")
        if (code := int(exit_code.read_text())) != 0:
            raise subprocess.CalledProcessError(code, command, output="\n".join(lines))
    return lines


def excerpt(lines: list[Text]) -> list[Text]:
    """The command, `...`, then from training to the end of the numbers."""
    first = next(number for number, line in enumerate(lines) if FIRST_SHOWN.match(line.plain))
    last = next(number for number, line in enumerate(lines) if LAST_SHOWN.match(line.plain))
    left_out = sum(line.plain.startswith("$ ") for line in lines[1:first])
    note = f"... {left_out} commands: the text, detokenised, as BPE, binarized"
    return [lines[0], Text(note, style="dim"), Text(""), *lines[first : last + 1], Text("...", style="dim")]


def draw(lines: list[Text], title: str) -> str:
    """Lines as a terminal in SVG, in a font of the reader's: nothing is fetched."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    picture = console.export_svg(title=title, unique_id="terminal")
    return re.sub(r"\s*@font-face \{.*?\n    \}", "", picture, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    try:
        lines = record("lmtools quickstart", given.folder)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.output}\n{error}")
    given.picture.write_text(draw(excerpt(list(AnsiDecoder().decode("\n".join(lines)))), "lmtools"), encoding="utf-8")


if __name__ == "__main__":
    main()
