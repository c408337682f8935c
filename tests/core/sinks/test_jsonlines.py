"""One event, one line, whatever a field holds."""

import json
from pathlib import Path

import gradientmail_core as gm
from gradientmail_core.events import FragmentAligned, RoundCommitted
from gradientmail_core.sim.world import ToyModel
from gradientmail_core.sinks import JsonLines


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_a_line_with_its_fields(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "deep" / "run.jsonl", clock=lambda: 12.0, node="a")
    sink(FragmentAligned(1, 9, 40, 2, 640, True, 0.5))
    sink(RoundCommitted(1, 9, ("a", "b"), ("c: stale",), float("nan"), 0.25))
    first, second = lines(tmp_path / "deep" / "run.jsonl")
    assert first == {
        "time": 12.0, "event": "FragmentAligned", "node": "a", "fragment": 1, "round": 9, "step": 40,
        "participants": 2, "tokens": 640, "merged": True, "cosine": 0.5,
    }  # fmt: skip
    assert second["participants"] == ["a", "b"] and second["cosine"] is None


def test_a_file_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = JsonLines(path)
    sink(FragmentAligned(1, 9, 40, 2, 640, True, 0.5))
    path.rename(tmp_path / "old.jsonl")
    sink(FragmentAligned(1, 11, 50, 2, 640, True, 0.5))
    assert [line["round"] for line in lines(path)] == [11]


def test_a_session_tells_its_whole_life(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    algorithm = gm.DiLoCo(sync_every=2, fragments=1, overlap_steps=0)
    with gm.Session(
        ToyModel(), mailbox=gm.MemoryMailbox(), algorithm=algorithm, callbacks=[JsonLines(path)]
    ) as session:
        for _ in range(4):
            session.step()
    told = [line["event"] for line in lines(path)]
    assert told[0] == "RunCreated" and told[-1] == "SessionEnded"
    assert {"SnapshotPublished", "FragmentAligned", "TokensBooked", "RoundCommitted"} <= set(told)
