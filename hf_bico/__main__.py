"""`python -m hf_bico`."""

from hf_bico.cli.main import main

main()
