"""The loopback Hub of this process, started before any client reads its environment; nothing of the user's own is left.

Import this before huggingface_hub, datasets or transformers: they read their endpoint and folders once.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from support.hub import Hub

TOKEN = "hf_secretOfUser"

HUB = Hub().start()
_HOME = Path(tempfile.mkdtemp(prefix="hf-bico-tests-"))
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
_OWN = HUB.environment(_HOME)
for _name in [name for name in os.environ if name not in _OWN]:
    del os.environ[_name]
os.environ.update(_OWN)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

validates_cards = pytest.mark.skipif(
    Version(version("huggingface_hub")) < Version("2.4"), reason="huggingface_hub posts cards to the Hub's own address"
)
"""For tests that have a card checked by the loopback Hub."""
