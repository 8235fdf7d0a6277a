"""A Hugging Face Hub on a loopback port: the real clients read from it and push to it, over HTTP, without a network.

Imports the standard library and PyYAML only, so that it can be started before the clients read `HF_ENDPOINT`.
"""

from . import reading, writing, xet  # noqa: F401 - importing them registers their routes
from .faults import Fault, Request
from .hub import Hub
from .store import Commit, Refusal, Repo

__all__ = ["Commit", "Fault", "Hub", "Refusal", "Repo", "Request"]
