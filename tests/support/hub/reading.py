"""The routes that read: identity, infos, listings, trees, files, discussions."""

from __future__ import annotations

import itertools
import re
from typing import Any
from urllib.parse import parse_qs, urlencode

from .info import (
    discussion_details,
    discussion_info,
    listed_info,
    repo_info,
    sharded_headers,
    tree_entry,
)
from .routes import TYPES, of_repo, plain
from .server import Answer, Call, ranged
from .store import Refusal, Repo

PAGE = 1000
EXPANDED_PAGE = 50
DISCUSSIONS_PAGE = 50


def page(call: Call, items: list[Any], size: int) -> Answer:
    """One page of a list, with a link to the next."""
    start = int(call.first("cursor", "0"))
    headers = {}
    if start + size < len(items):
        query = urlencode({**call.query, "cursor": [str(start + size)]}, doseq=True)
        headers["Link"] = f'<{call.hub.url}{call.target.partition("?")[0]}?{query}>; rel="next"'
    return Answer.json(items[start : start + size], headers=headers)


@plain("GET", "api/whoami-v2")
def whoami(call: Call) -> Answer:
    """Who the token belongs to."""
    if call.user is None:
        raise Refusal(401, "Invalid username or password.")
    user = call.hub.users[call.user]
    orgs = [{"type": "org", "name": name, "fullname": name, "roleInOrg": "write"} for name in user.orgs]
    token = {"displayName": "test", "role": call.role}
    return Answer.json(
        {
            "type": "user",
            "id": user.name,
            "name": user.name,
            "fullname": user.name,
            "orgs": orgs,
            "auth": {"type": "access_token", "accessToken": token},
        }
    )


@plain("GET", "api/agent-harnesses")
def agent_harnesses(call: Call) -> Answer:
    """An empty registry, so that a client's User-Agent does not depend on where the test runs."""
    return Answer.json({"standardEnvVars": [], "harnesses": {}})


@plain("GET", "api/telemetry/")
def telemetry(call: Call) -> Answer:
    """Thanks."""
    return Answer()


def list_repos(call: Call) -> Answer:
    """The repositories that this user sees, filtered as the clients ask."""
    repos = [repo for repo in list(call.hub.repos.values()) if repo.type == TYPES[call.parts[1]]]
    repos = [repo for repo in repos if call.hub.sees(call.user, repo)]
    if "author" in call.query:
        repos = [repo for repo in repos if repo.namespace == call.first("author")]
    for words in call.query.get("search", []):
        repos = [repo for repo in repos if all(word in repo.id.lower() for word in words.lower().split())]
    if "gated" in call.query:
        repos = [repo for repo in repos if bool(repo.gated) == call.flag("gated")]
    tags = call.query.get("filter", []) + call.query.get("pipeline_tag", [])
    if tags:
        repos = [repo for repo in repos if set(tags) <= set(repo_info(repo, repo.at())["tags"])]
    keys = {
        "downloads": lambda repo: repo.downloads,
        "likes": lambda repo: repo.likes,
        "createdAt": lambda repo: repo.created,
        "lastModified": lambda repo: repo.at().date,
    }
    if call.first("sort") in keys:
        repos.sort(key=keys[call.first("sort")], reverse=True)
    flags = (call.flag("full"), call.flag("cardData"), call.flag("config"))
    found = [listed_info(repo, *flags, expand=call.query.get("expand", [])) for repo in repos]
    return page(call, found, min(int(call.first("limit", str(PAGE))), PAGE) or PAGE)


for plural in TYPES:
    plain("GET", f"api/{plural}")(list_repos)


@of_repo("GET", "", "see")
def info(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """The info at main, which everybody who sees the repository may read."""
    return Answer.json(repo_info(repo, repo.at(), call.flag("blobs"), call.query.get("expand", [])))


@of_repo("GET", "revision", "see")
def revision_info(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """The info at a revision."""
    return Answer.json(repo_info(repo, repo.at(arguments[0]), call.flag("blobs"), call.query.get("expand", [])))


@of_repo("GET", "auth-check", "read")
def auth_check(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Whether this user may read, or write."""
    if arguments == ["write"] and not (call.role == "write" and call.hub.owns(call.user, repo.namespace)):
        raise Refusal(403, "You don't have the rights to write to this repository")
    return Answer.json({})


@of_repo("GET", "tree", "read")
def tree(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """The entries of a folder, or all below it."""
    commit = repo.at(arguments[0])
    folder = "/".join(arguments[1:]).strip("/")
    inside = commit.within(folder)
    if folder and not inside:
        raise Refusal(404, f"{folder} does not exist on {arguments[0]}", "EntryNotFound")
    skip = len(folder) + 1 if folder else 0
    found: dict[str, None] = {}
    for path in sorted(inside):
        pieces = path[skip:].split("/")
        deep = len(pieces) if call.flag("recursive") else 1
        for size in range(1, deep + 1):
            found[path[:skip] + "/".join(pieces[:size])] = None
    expand = call.flag("expand")
    size = EXPANDED_PAGE if expand else PAGE
    start = int(call.first("cursor", "0"))
    # entries of other pages are not made: each costs a walk through the history when it is expanded
    entries = [
        tree_entry(repo, commit, path, expand) if start <= index < start + size else None
        for index, path in enumerate(found)
    ]
    return page(call, entries, size)


@of_repo("POST", "paths-info", "read")
def paths_info(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """The entries of the paths that exist."""
    if "json" in call.headers.get("Content-Type", ""):
        asked = call.json()
        paths, expand = list(asked.get("paths", [])), bool(asked.get("expand"))
    else:
        form = parse_qs(call.body.read().decode())
        paths, expand = form.get("paths", []), form.get("expand", ["false"])[0].lower() == "true"
    commit = repo.at(arguments[0])
    entries = (tree_entry(repo, commit, path.strip("/"), expand) for path in paths)
    return Answer.json([entry for entry in entries if entry is not None])


@of_repo("GET", "refs", "see")
def refs(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Branches, tags and, when asked for, pull requests."""

    def named(refs: dict[str, str], folder: str) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"{folder}{name}", "targetCommit": sha} for name, sha in list(refs.items())]

    found = {
        "branches": named(repo.branches, "refs/heads/"),
        "converts": [],
        "tags": named(repo.tags, "refs/tags/"),
    }
    if call.flag("include_prs"):
        found["pullRequests"] = named({f"refs/pr/{num}": sha for num, sha in repo.pulls.items()}, "")
    return Answer.json(found)


@of_repo("GET", "commits", "read")
def commits(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """The history, newest first."""
    found = [
        {
            "id": commit.sha,
            "title": commit.title,
            "message": commit.description,
            "authors": [{"user": commit.author}],
            "date": commit.date,
        }
        for commit in repo.history(arguments[0])
    ]
    return page(call, found, EXPANDED_PAGE)


@of_repo("GET", "safetensors-metadata", "read")
def safetensors_metadata(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """The headers of all shards at once."""
    path = "/".join(arguments)
    repo.file(path)
    return Answer.json(sharded_headers(repo.at(), path))


@of_repo("GET", "resolve", "read")
def resolve(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """A file, or the range of it that is asked for."""
    bare_ref = arguments[0] == "refs"  # some addresses keep the slashes of refs/pr/1
    revision = "/".join(arguments[:3]) if bare_ref else arguments[0]
    path = "/".join(itertools.islice(arguments, 3 if bare_ref else 1, None))
    file = repo.file(path, revision)
    text = not file.lfs and re.search(r"\.(json|md|txt|ya?ml|py)$", path)
    headers = {
        "X-Repo-Commit": repo.head(revision),
        "ETag": f'"{file.etag}"',
        "Accept-Ranges": "bytes",
        "Content-Type": "text/plain; charset=utf-8" if text else "application/octet-stream",
    }
    if file.lfs:
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    return ranged(Answer(200, file.blob, headers), call.headers.get("Range") if call.method == "GET" else None)


@of_repo("GET", "discussions", "see")
def discussions(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """The list of discussions and pull requests, newest first, or one with its details."""
    if arguments:
        num = int(arguments[0]) if arguments[0].isdigit() else 0
        if num not in repo.discussions:
            raise Refusal(404, f"No discussion {arguments[0]}")
        return Answer.json(discussion_details(repo, repo.discussions[num]))
    found = sorted(repo.discussions.values(), key=lambda discussion: -discussion.num)
    if (type := call.first("type", "all")) != "all":
        found = [discussion for discussion in found if discussion.pull_request == (type == "pull_request")]
    if (status := call.first("status", "all")) != "all":
        open_ = ("open", "draft")
        found = [discussion for discussion in found if (discussion.status in open_) == (status == "open")]
    if "author" in call.query:
        found = [discussion for discussion in found if discussion.author == call.first("author")]
    start = int(call.first("p", "0")) * DISCUSSIONS_PAGE
    shown = [discussion_info(repo, discussion) for discussion in found[start : start + DISCUSSIONS_PAGE]]
    return Answer.json({"discussions": shown, "count": len(found), "start": start})
