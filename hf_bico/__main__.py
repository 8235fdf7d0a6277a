"""`python -m hf_bico`."""

from hf_bico.cli import main

main()
