"""Every figure the documents quote, recomputed from the committed logs in ``docs/results/``.

A document marks a place with ``<!-- figures: NAME -->`` … ``<!-- end -->``; this script fills it from
``docs/results/NAME.json``, the file that ``make demo JSON=…`` or ``make bench-kernels JSON=…`` wrote, or for a
quality study from its rows in ``benchmarks/quality/logs/``. Without that file the place says so. A test fails
while a document differs from what this script would write.

    python -m docs.quote            rewrite the documents
    python -m docs.quote --check    exit 1 if one is out of date
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

Figures: TypeAlias = Mapping[str, object]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
STUDY_LOGS = ROOT / "benchmarks" / "quality" / "logs"
PLACE = re.compile(r"(?P<open><!-- figures: (?P<name>[a-z_-]+) -->\n).*?(?P<close><!-- end -->)", re.DOTALL)
NOT_MEASURED = "*Not measured yet.*\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def entries(figures: Figures, name: str) -> list[Figures]:
    """The list of objects called ``name``, empty if there is none."""
    found = figures.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def number(figures: Figures, name: str, digits: int) -> str:
    """The number called ``name`` with ``digits`` decimals, or a dash."""
    value = figures.get(name)
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "–"


def inner(figures: Figures, name: str) -> Figures:
    """The object called ``name``, empty if there is none."""
    found = figures.get(name)
    return found if isinstance(found, dict) else {}


def demo(figures: Figures) -> str:
    """Held-out loss of one node alone and of nodes merged, a row for each seed and their mean."""
    seeds = [*entries(figures, "per_seed"), {**figures, "seed": "mean"}]
    rows = [[str(row.get("seed")), number(row, "single_loss", 3), number(row, "merged_loss", 3)] for row in seeds]
    losses = table(["seed", "one node alone", f"{figures['nodes']} nodes merged"], rows)
    return f"{losses}\n{demo_setup(figures)}"


def demo_setup(figures: Figures) -> str:
    """What the demo ran, as sentences."""
    settings, outer = inner(figures, "settings"), inner(figures, "outer")
    options = [f"{name} {value:g}" for name, value in outer.items() if isinstance(value, int | float) and value]
    return (
        f"Held-out loss in nats per byte after {settings['steps']} steps of each node; "
        f"{number(figures, 'parameters', 0)} parameters, merged every {settings['sync_every']} steps.\n"
        f"Outer optimizer: {outer['name']} ({', '.join(options)}). "
        f"With a late join and a kill: {number(figures, 'churn_loss', 3)}. "
        f"The whole demo took {number(figures, 'seconds', 0)} s.\n"
    )


def kernels(figures: Figures) -> str:
    """Throughput of each operation beside one memory copy."""
    rows = [
        [f"`{row['name']}`", number(row, "gb_per_s", 2), number(row, "copy_ratio", 2)]
        for row in entries(figures, "rows")
    ]
    return table(["operation", "GB/s", "time, in copies"], rows)


def table_four(figures: Figures) -> str:
    """Streaming DiLoCo's table 4, the published figure before ours in each cell."""
    targets = figures["targets"]
    assert isinstance(targets, list)
    rows = []
    for row in entries(figures, "rows"):
        published, ours, apart = row["published"], row["ours"], row["apart"]
        assert isinstance(published, list) and isinstance(ours, list) and isinstance(apart, list)
        pairs = [
            f"{one:g} / **{other:.1f}**" if steps else f"{one:g} / {other:.1f}"
            for one, other, steps in zip(published, ours, apart, strict=True)
        ]
        rows.append([f"{row['model']} {row['method']}", *pairs])
    head = ["published / ours, Gbit/s", *(f"{target:.0%}" for target in targets)]
    return (
        f"{table(head, rows)}\n{figures['equal']} of {figures['cells']} cells are the same point of the grid; "
        f"the others (bold) are at most {figures['farthest']} step away.\n"
    )


def failures(figures: Figures) -> str:
    """What a fleet under faults made of its time, as a table of means."""
    named = [
        ("share of node time spent training", "goodput"),
        ("share of trained tokens merged", "merged_share"),
        ("rounds committed, of those due", "committed_share"),
        ("nodes in a round", "participants"),
        ("a lock-step run's share of time", "lock_step"),
    ]
    shown = [
        [what, number(figures, name, 2) if name == "participants" else percent(figures, name)]
        for what, name in named
        if name in figures
    ]
    setup = f"{number(figures, 'minutes', 0)} virtual minutes, means over {figures['seeds']} seeds.\n"
    return f"{table(['', 'mean'], shown)}\n{setup}"


def percent(figures: Figures, name: str, digits: int = 1) -> str:
    """The share called ``name`` in per cent."""
    value = figures.get(name)
    return f"{100 * value:.{digits}f} %" if isinstance(value, int | float) else "–"


def peers(figures: Figures) -> str:
    """Rounds closed by this library and by its predecessor, and how many times less this one takes."""
    named = {
        "peer": "gradientmail 0.0.2",
        "ours": "this library",
        "ours_in_memory": "this library, all in memory",
        "ours_judged": "this library, from the last arrival",
    }
    rows = [
        [
            title,
            *(number(inner(figures, name), column, 2) for column in ("first_seconds", "seconds")),
            *(gib(inner(figures, name), column) for column in ("peak_bytes", "extra_bytes")),
        ]
        for name, title in named.items()
    ]
    said = {"ours": "", "ours_in_memory": "All in memory ", "ours_judged": "From the last arrival "}
    ratios = [how + times_less(inner(figures, f"{name}_ratios")) for name, how in said.items()]
    head = ["", "first round, s", "later rounds, s", "peak, GiB", "of it beyond the inputs, GiB"]
    return (
        f"{table(head, rows)}\n{' '.join(ratios)} "
        f"{number(figures, 'mi', 0)} Mi parameters, two cores at a load of {number(figures, 'load', 1)}.\n"
    )


def times_less(ratios: Figures) -> str:
    """Seconds and memory of the peer over ours, in words."""
    first, later = (number(ratios, name, 1) for name in ("first_seconds", "seconds"))
    memory = number(ratios, "peak_bytes", 1)
    return f"{first} times faster in the first round, {later} times in later ones, with {memory} times less memory."


def object_stores(figures: Figures) -> str:
    """Rates each way of each client library, beside boto3's in the same round, and its CPU."""
    columns = ("mb_per_s", 0), ("of_boto3", 2), ("cpu_s_per_gb", 2)
    rows = [
        [
            name,
            *(
                number(inner(figures, name), f"{way}_{what}", digits)
                for way in ("up", "down")
                for what, digits in columns
            ),
        ]
        for name in figures
    ]
    head = [f"{what}, {way}" for way in ("up", "down") for what in ("MB/s", "of boto3", "CPU s/GB")]
    return table(["client", *head], rows)


def utilization(figures: Figures) -> str:
    """How much of the time nodes train on the engine over two links, and how many starts are mixed in time."""
    rows: dict[str, dict[float, Figures]] = {}
    for row in entries(figures, "engine"):
        rows.setdefault(str(row["algorithm"]), {})[float(str(row["link_mbit"]))] = row
    links = sorted({link for by_link in rows.values() for link in by_link}, reverse=True)
    head = [cell for link in links for cell in (f"trains at {link:.0f} Mbit/s", "mixed in time")]
    shown = [
        [name, *(cell for link in links for cell in trained_and_mixed(by_link.get(link, {})))]
        for name, by_link in rows.items()
        if not name.startswith("DiLoCo overlapped")
    ]
    return table(["", *head], shown)


def trained_and_mixed(row: Figures) -> tuple[str, str]:
    """A row's share of time in training, and of starts mixed; DiLoCo mixes none."""
    mixed = "" if str(row.get("algorithm")).startswith("DiLoCo") else percent(row, "mixed", 0)
    return f"{number(row, 'utilization', 0)} %", mixed


def thousand(figures: Figures) -> str:
    """What an hour of a thousand nodes took, and what came of it, as a sentence."""
    run, seconds = inner(figures, "figures"), figures["wall_seconds"]
    assert isinstance(seconds, int | float)
    merged = percent({"share": _over(run, "tokens_merged", "tokens_trained")}, "share", 0)
    asked = number({"each": _over(run, "requests_per_day", "nodes")}, "each", 0)
    return (
        f"took {int(seconds / 60)} min {seconds % 60:.0f} s ({number(figures, 'cpu_seconds', 0)} s of CPU time; "
        f"{figures['machine']}) and {gib({'peak': _kib(figures)}, 'peak')} GiB at most: "
        f"{number(run, 'faults', 0)} crashes and returns, {number(run, 'rounds', 0)} rounds of "
        f"{number(run, 'participants', 0)} participants on average, {percent(run, 'goodput')} of node time trained, "
        f"{merged} of trained tokens merged, {asked} requests a node and day.\n"
    )


def _over(figures: Figures, part: str, whole: str) -> float:
    over, under = figures[part], figures[whole]
    assert isinstance(over, int | float) and isinstance(under, int | float)
    return over / under


def _kib(figures: Figures) -> float:
    kib = figures["peak_rss_kib"]
    assert isinstance(kib, int | float)
    return 1024 * kib


def gib(figures: Figures, name: str) -> str:
    """A number of bytes in GiB."""
    value = figures.get(name)
    return f"{value / 2**30:.2f}" if isinstance(value, int | float) else "–"


RENDERERS: dict[str, Callable[[Figures], str]] = {
    "demo": demo,
    "kernels": kernels,
    "table-four": table_four,
    "goodput": failures,
    "storm": failures,
    "peers": peers,
    "object_stores": object_stores,
    "utilization": utilization,
    "thousand": thousand,
}


def codecs(rows: Sequence[Figures]) -> str:
    """Held-out loss of each delta codec, with and without error feedback."""
    from benchmarks.quality.tables import codec_table  # brings torch, which the other figures do without

    return codec_table(rows) + "\n"


def outer(rows: Sequence[Figures]) -> str:
    """Held-out loss under each outer optimizer, and how each does over all situations."""
    from benchmarks.quality.tables import outer_table

    return outer_table(rows) + "\n"


def carry(rows: Sequence[Figures]) -> str:
    """Held-out loss where a commit overwrites what was trained meanwhile, and where that is carried over."""
    from benchmarks.quality.carry import table as carry_table

    return carry_table(rows) + "\n"


def gossip(rows: Sequence[Figures]) -> str:
    """Held-out loss of what mixes less than DiLoCo."""
    from benchmarks.quality.gossip import table as gossip_table

    return gossip_table(rows) + "\n"


STUDIES: dict[str, Callable[[Sequence[Figures]], str]] = {
    "codecs": codecs,
    "outer": outer,
    "carry": carry,
    "gossip": gossip,
}


def rendered(name: str) -> str:
    """What stands between the marks of ``name``."""
    if name in STUDIES:
        log = STUDY_LOGS / f"{name}.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return STUDIES[name]([json.loads(line) for line in lines]) if lines else NOT_MEASURED
    log = RESULTS / f"{name}.json"
    return RENDERERS[name](json.loads(log.read_text(encoding="utf-8"))) if log.exists() else NOT_MEASURED


def filled(text: str) -> str:
    """``text`` with every marked place brought up to date."""
    return PLACE.sub(lambda place: f"{place['open']}{rendered(place['name'])}{place['close']}", text)


def documents() -> list[Path]:
    """The documents that may quote figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(arguments: Sequence[str]) -> int:
    """Rewrite, or check, every document; the exit code."""
    stale = [
        path for path in documents() if filled(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")
    ]
    for path in stale:
        print(
            f"{path.relative_to(ROOT)}: figures out of date" if "--check" in arguments else f"{path.relative_to(ROOT)}"
        )
        if "--check" not in arguments:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
