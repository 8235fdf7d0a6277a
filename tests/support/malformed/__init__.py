"""Malformed inputs of every reader, as a table; see `table.Case`."""

from support.malformed import adapter_files, cards, configs, data_files, indexes, records, tokenizers, weight_files
from support.malformed.table import CASES as CASES

PARTS = (adapter_files, cards, configs, data_files, indexes, records, tokenizers, weight_files)
"""Each has entered its own when it was imported."""
