"""The README's program for the Trainer, run as it stands there."""

import re
from pathlib import Path

from gradientmail_core.mailbox import MemoryMailbox
from gradientmail_core.session import aligning
from tests.hf.nodes import arguments, llama, rows

README = Path(__file__).parents[2] / "README.md"


def test_the_program_trains_in_a_run(tmp_path, monkeypatch):
    """Only the place of the mailbox is another: the one it names is on no test machine."""
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (snippet,) = [text for text in snippets if "gradientmail_hf" in text]
    opened = []
    mailbox = MemoryMailbox()
    monkeypatch.setattr(aligning, "open_mailbox", lambda url, **options: opened.append(url) or mailbox)
    names = {"model": llama(), "args": arguments(tmp_path, max_steps=210), "data": rows()}
    exec(compile(snippet, str(README), "exec"), names)
    assert opened == ["file:///mnt/shared/run-1"]
    assert names["trainer"].state.global_step == 210
    assert names["trainer"].state.log_history[-1]["gradientmail/round"] >= 4
