"""Chat templates that others wrote, rendered in a process of its own: within seconds and bounded memory, or not at all.

transformers lets a template reach no code of Python's, but it may loop and grow as it likes. Knows templates and
messages, not tokens.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from queue import Empty, Queue
from typing import Any

SECONDS = 5.0
"""How long one chat may take; real templates take thousandths."""
START_SECONDS = 120.0
MEMORY = 2**30
"""Bytes that a rendering may take."""

_RENDERER = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template
try:
    import resource
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + {memory}, resource.RLIM_INFINITY))
except (ImportError, OSError, ValueError):
    pass  # where there are no such limits, time is the limit
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    try:
        rendered, _ = render_jinja_template(**asked)
        text = json.dumps(["text", rendered[0]])
    except Exception as error:
        text = json.dumps(["error", " ".join(f"{{type(error).__name__}}: {{error}}".split())[:300]])
    print(text, flush=True)
"""


class Renderer:
    """A process that renders chats with whatever template; one that does not answer is ended."""

    def __init__(self) -> None:
        code = _RENDERER.format(memory=MEMORY)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._answers: Queue[bytes] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.alive = True
        self._answer(START_SECONDS)

    def render(self, asked: str) -> str:
        """The text of a chat; a ValueError where the template cannot take it, or takes too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(asked.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.end()
            raise ValueError("its process has ended") from None
        kind, text = json.loads(self._answer(SECONDS))
        if kind == "error":
            raise ValueError(text)
        return str(text)

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def _answer(self, seconds: float) -> bytes:
        try:
            answer = self._answers.get(timeout=seconds)
        except Empty:
            answer = b""
        except BaseException:  # an interrupt: the answer would be taken for the next one's
            self.end()
            raise
        if not answer:
            self.end()
            raise ValueError(f"it is not rendered within {SECONDS:g} seconds and {MEMORY >> 30} GiB")
        return answer


_only: list[Renderer] = []
_lock = threading.Lock()


def _render_bounded(asked: str) -> str:
    with _lock:
        if not _only or not _only[0].alive:
            _only[:] = [Renderer()]
        return _only[0].render(asked)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], answering: bool) -> str:
    """The text of a chat by the tokenizer's own template; a ValueError where it cannot be rendered."""
    from transformers import PreTrainedTokenizerBase

    chat = [dict(message) for message in messages]
    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        rendered: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answering)
        return rendered
    asked = {
        **tokenizer.special_tokens_map,
        "conversations": [chat],
        "chat_template": tokenizer.get_chat_template(),
        "add_generation_prompt": answering,
    }
    return _render_bounded(json.dumps(asked, default=str))


@atexit.register
def _end() -> None:
    for renderer in _only:
        renderer.end()
