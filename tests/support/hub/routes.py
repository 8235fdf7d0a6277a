"""From a request's path to the function that answers it, past the repository's rights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, cast

from .server import Answer, Call
from .store import Refusal, Repo, Type

Access = Literal["see", "read", "write", "propose"]
RepoRoute = Callable[[Call, Repo, list[str]], Answer]

TYPES: dict[str, Type] = {"models": "model", "datasets": "dataset", "spaces": "space"}
PREFIXES: dict[Type, str] = {"model": "", "dataset": "datasets/", "space": "spaces/"}

plain_routes: dict[tuple[str, str], Callable[[Call], Answer]] = {}
repo_routes: dict[tuple[str, str], tuple[Access, RepoRoute]] = {}


def plain(method: str, path: str) -> Callable[[Callable[[Call], Answer]], Callable[[Call], Answer]]:
    """Registers an answer for one path, or for all below it when it ends with a slash."""

    def register(function: Callable[[Call], Answer]) -> Callable[[Call], Answer]:
        plain_routes[method, path] = function
        return function

    return register


def of_repo(method: str, action: str, access: Access) -> Callable[[RepoRoute], RepoRoute]:
    """Registers an answer for `/api/T/{id}/{action}/...`; it gets the repository and what follows the action."""

    def register(function: RepoRoute) -> RepoRoute:
        repo_routes[method, action] = (access, function)
        return function

    return register


def route(call: Call) -> Answer:
    """The answer to a request."""
    method = "GET" if call.method == "HEAD" else call.method
    path = "/".join(call.parts)
    for size in range(len(call.parts), 0, -1):
        key = path if size == len(call.parts) else "/".join(call.parts[:size]) + "/"
        if (method, key) in plain_routes:
            return plain_routes[method, key](call)
    if call.parts[0] == "api" and len(call.parts) > 2 and call.parts[1] in TYPES:
        return _repo_answer(call, method, TYPES[call.parts[1]], call.parts[2:])
    if call.parts[0] != "api":
        type = TYPES.get(call.parts[0], "model")
        rest = call.parts[1:] if PREFIXES[type] else call.parts
        if "resolve" in rest[1:3]:
            return _repo_answer(call, method, type, rest)
        if path.endswith(".git/info/lfs/objects/batch"):
            name = "/".join(rest[:-4]).removesuffix(".git")
            return _repo_answer(call, method, type, [*name.split("/"), "lfs-batch"])
    raise Refusal(404, f"Sorry, we can't find the page you are looking for: {call.method} /{path}")


def _repo_answer(call: Call, method: str, type: Type, rest: list[str]) -> Answer:
    actions = {action for _, action in repo_routes}
    length = 1 if len(rest) == 1 or (rest[1] in actions and (type, "/".join(rest[:2])) not in call.hub.repos) else 2
    action = rest[length] if len(rest) > length else ""
    if (method, action) not in repo_routes:
        raise Refusal(404 if action not in actions else 405, f"No route: {call.method} {call.target}")
    access, function = repo_routes[method, action]
    arguments = rest[length + 1 :]
    repo_id = "/".join(rest[:length])
    _follow_move(call, type, repo_id)
    repo = open_repo(call, type, repo_id)
    admit(call, repo, access, arguments)
    return function(call, repo, arguments)


def _follow_move(call: Call, type: Type, repo_id: str) -> None:
    """Sends a request for a renamed repository to its new name, whatever the rest of the address."""
    new = call.hub.moved.get((type, repo_id))
    if new is not None:
        start = re.match("/api/[a-z]+/|/datasets/|/spaces/|/", call.target)
        place = start.end() if start else 0
        location = call.target[:place] + call.target[place:].replace(repo_id, new, 1)
        raise Refusal(307, f"Moved to {new}", headers={"Location": location})


def open_repo(call: Call, type: Type, repo_id: str) -> Repo:
    """The repository if this user may know of it."""
    repo = call.hub.repos.get((type, repo_id))
    if repo is None or not call.hub.sees(call.user, repo):
        if call.user is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")
    return repo


def admit(call: Call, repo: Repo, access: Access, arguments: list[str]) -> None:
    """Refuses what this user may not do with a repository that they see."""
    if access in ("read", "write", "propose") and repo.disabled:
        raise Refusal(403, "Access to this resource is disabled.")
    if access == "read" and not call.hub.enters(call.user, repo):
        start = f"Access to {repo.type} {repo.id} is restricted"
        if call.user is None:
            message = f"{start}. You must have access to it and be authenticated to access it. Please log in."
            raise Refusal(401, message, "GatedRepo")
        message = f"{start} and you are not in the authorized list. Visit {call.hub.url}/{repo.id} to ask for access."
        raise Refusal(403, message, "GatedRepo")
    if access in ("write", "propose"):
        need_user(call, "RepoNotFound")
        own = call.hub.owns(call.user, repo.namespace)
        if not own and not (access == "propose" and _proposes(call, repo, arguments)):
            hint = "pass `create_pr=1` as a query parameter to create a Pull Request"
            raise Refusal(403, hint if access == "propose" else "You don't have the rights to change this repository")


def need_user(call: Call, code: str | None = None) -> str:
    """The name behind the request; 401 for nobody, 403 for a token that only reads."""
    if call.user is None:
        raise Refusal(401, "Invalid username or password.", code)
    if call.role != "write":
        raise Refusal(403, "This token has read access only: use a token with write access")
    return call.user


def _proposes(call: Call, repo: Repo, arguments: list[str]) -> bool:
    """Whether the request writes to a pull request, which everybody may open and its author may add to."""
    if call.flag("create_pr"):
        return True
    revision = arguments[0] if arguments else call.json().get("ref", {}).get("name", "")
    if not revision:
        return True
    number = cast(str, revision).removeprefix("refs/pr/")
    return number.isdigit() and int(number) in repo.discussions and repo.discussions[int(number)].author == call.user
