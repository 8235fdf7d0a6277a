"""What the tests share: small models and scenes, a Hub on a loopback port, processes, and the writers of the pages."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
KEPT = ROOT / ".cache" / "tests"
"""What is kept from one run of the tests to the next; git ignores it, and `make clean` removes it."""
