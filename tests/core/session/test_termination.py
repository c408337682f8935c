"""SIGTERM as an exception, where nobody else handles it: a clean leave, honest codes, nobody's handler taken over."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import gradientmail_core as gm
from gradientmail_core.session import termination
from gradientmail_core.sim.world import ToyModel

SCRIPT = Path(__file__).with_name("terminated_node.py")


def terminated(directory: Path, kind: str, number: signal.Signals = signal.SIGTERM) -> tuple[int, list[str]]:
    """A process that was sent a signal while it trained: its exit code, and the state letters of its last lease."""
    command = [sys.executable, str(SCRIPT), str(directory), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "training"
    process.send_signal(number)
    process.communicate(timeout=60)
    leases = sorted(path.name for path in (directory / "live/leases/a").iterdir())
    return process.returncode, [name.split("-")[1][0] for name in leases][-1:]


@pytest.mark.parametrize(
    ("kind", "code", "state"), [("with", 143, "x"), ("joined", 143, "x"), ("own", 7, "x"), ("off", -15, "t")]
)
def test_a_terminated_process_leaves_the_run(tmp_path: Path, kind: str, code: int, state: str) -> None:
    assert terminated(tmp_path, kind) == (code, [state])
    assert kind == "off" or not [
        path for path in tmp_path.rglob("*") if ".tmp" in path.name or path.name.startswith(".")
    ]


@pytest.mark.parametrize("kind", ["with", "join", "step"])
def test_control_c_leaves_the_run_from_wherever_it_is(tmp_path: Path, kind: str) -> None:
    """While it trains, waits for other nodes, or waits for a round: never a success, and nothing half-written."""
    assert terminated(tmp_path, kind, signal.SIGINT) == (-signal.SIGINT, ["x"])
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name or path.name.startswith(".")]


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_raises_between_begin_and_end():
    termination.end_by_exception()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    termination.end_as_before()
    termination.end_as_before()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_somebody_elses_handler_stays():
    def theirs(number, frame):
        heard.append(number)

    heard = []
    signal.signal(signal.SIGTERM, theirs)
    termination.end_by_exception()
    signal.raise_signal(signal.SIGTERM)
    termination.end_as_before()
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is theirs


def test_a_handler_that_came_later_stays():
    termination.end_by_exception()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    termination.end_as_before()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_other_threads_do_nothing():
    failures = []

    def elsewhere():
        try:
            termination.end_by_exception()
            termination.end_as_before()
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failures
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def opened(**options: Any) -> gm.Session:
    algorithm = gm.DiLoCo(sync_every=5)
    return gm.Session(ToyModel(), mailbox=gm.MemoryMailbox(), algorithm=algorithm, callbacks=[], **options)


def test_the_default_is_back_after_the_last_session() -> None:
    with opened():
        with opened():
            handler = signal.getsignal(signal.SIGTERM)
            assert handler != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_signal_ends_a_step_and_the_second_ends_the_process() -> None:
    with pytest.raises(SystemExit) as end, opened() as session:
        session.step()
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 143 and session.ended
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_that_is_set_stays() -> None:
    def own(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, own)
    with opened():
        assert signal.getsignal(signal.SIGTERM) is own
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_handler_set_meanwhile_stays() -> None:
    def own(number: int, frame: object) -> None: ...

    with opened():
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own


def test_nothing_is_handled_off_the_main_thread_or_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    def node() -> None:
        with opened():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[Any] = []
    thread = threading.Thread(target=node)
    thread.start()
    thread.join()
    monkeypatch.setitem(sys.modules, "ipykernel", termination)
    node()
    assert seen == [signal.SIG_DFL] * 2
