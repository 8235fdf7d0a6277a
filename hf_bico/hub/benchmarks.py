"""Find which task of a benchmark a split of a data set is, where the Hub registers the data set as a benchmark.

A benchmark has an `eval.yaml` that lists its tasks, and is on the Hub's own list. Knows no results.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hf_bico.errors import RepoError
from hf_bico.hub.client import HubRepo
from hf_bico.hub.retries import is_offline, request_errors
from hf_bico.utils.files import read_yaml

TASKS_FILE = "eval.yaml"
_MAX_BYTES = 1_000_000
_DEFAULT_CONFIG = "default"


def benchmark_task(repo: HubRepo, config: str | None, split: str) -> str | None:
    """Return the id of the task that is this split; None without exactly one, or if the Hub does not answer."""
    if is_offline() or not 0 < repo.files.get(TASKS_FILE, 0) <= _MAX_BYTES:
        return None
    with suppress(RepoError, ValueError, *request_errors()):
        tasks = read_yaml(repo.fetch([TASKS_FILE]) / TASKS_FILE).get("tasks")
        found = [task["id"] for task in _entries(tasks) if _is_of(task, config, split)]
        if len(found) == 1 and _is_registered(repo):
            return str(found[0])
    return None


def _entries(tasks: Any) -> list[dict[str, Any]]:
    entries = tasks if isinstance(tasks, list) else []
    return [task for task in entries if isinstance(task, dict) and isinstance(task.get("id"), str)]


def _is_of(task: dict[str, Any], config: str | None, split: str) -> bool:
    return task.get("split") == split and task.get("config", _DEFAULT_CONFIG) == (config or _DEFAULT_CONFIG)


def _is_registered(repo: HubRepo) -> bool:
    owner, _, name = repo.id.rpartition("/")
    listed = repo.request(lambda: list(repo.hub.api.list_datasets(author=owner, search=name, benchmark="official")))
    return any(info.id == repo.id for info in listed)
