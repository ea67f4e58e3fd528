"""fairseq's own commands in the documentation are understood by fairseq."""

from __future__ import annotations

import json
import subprocess

from tests.support.documents import PAGES, blocks, commands
from tests.test_docs import FAIRSEQ

PARSE = """
import json, sys
from fairseq import options
parsers = {
    "fairseq-preprocess": options.get_preprocessing_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-train": options.get_training_parser,
}
for program, *arguments in json.load(sys.stdin):
    parser = parsers[program]()
    if program == "fairseq-preprocess":
        parser.parse_args(arguments)
    else:
        options.parse_args_and_arch(parser, arguments)
"""


def test_old_commands_are_understood(fairseq_python):
    shown = [command for page in PAGES for block in blocks(page, "bash") for command in commands(block)]
    old = [command for command in shown if command[0] in FAIRSEQ]
    assert {command[0] for command in old} == FAIRSEQ
    ran = subprocess.run(
        [fairseq_python, "-c", PARSE], input=json.dumps(old), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
