"""`python -m lmtools` is `lmtools`; worker processes are started this way."""

from lmtools.cli import main

main()
