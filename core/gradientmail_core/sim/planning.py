"""Planning a run: each preset, played by the engine on virtual time with payloads of the model's size.

Nothing is estimated that can be counted: stalls, rounds, bytes and requests come out of a few cycles of the real
protocol over the given line. Dollars are AWS list prices of S3 Standard in us-east-1 (2025): requests by kind, and
egress to the internet, which most other stores and nodes in the same region do not charge.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradientmail_core.algorithms.diloco import DiLoCo
from gradientmail_core.errors import ConfigurationError
from gradientmail_core.protocol.leases import Timeouts
from gradientmail_core.sim.fleet import Fleet, Outcome, Schedule, failures, run
from gradientmail_core.sim.store import Traffic, Weather
from gradientmail_core.tensors.codecs import codec_named

PRESETS = ("standard", "streaming", "decoupled", "eager", "sparse", "local_sgd")
CYCLES = 4
NODES_MOST = 48
ENOUGH = 0.95
LEASE_SECONDS = Timeouts().lease
DOLLARS_PER_PUT, DOLLARS_PER_GET = 0.005 / 1000, 0.0004 / 1000
DOLLARS_PER_EGRESS_BYTE = 0.09 / 1e9
HALF = frozenset({"BF16", "F16"})


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned: the model, the nodes, their line (bytes per second, seconds) and their failures."""

    parameters: int
    nodes: int
    bandwidth: float
    latency: float = 0.03
    step_seconds: float = 1.0
    tokens: int = 1024
    mtbf: float | None = None
    down: float = 60.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Dollars for what was asked of the store: requests, and egress where it is charged."""

    dollars: float
    egress_dollars: float


@dataclass(frozen=True, slots=True)
class Row:
    """A preset's answer to a question. ``nodes`` were simulated; what is per node or a share holds for more."""

    preset: str
    settings: DiLoCo
    outcome: Outcome

    @property
    def dollars_per_node_day(self) -> float:
        """Requests, without egress."""
        return costs(self.outcome.traffic).dollars * self.days

    @property
    def egress_dollars_per_node_day(self) -> float:
        """Downloads, where they are charged."""
        return costs(self.outcome.traffic).egress_dollars * self.days

    @property
    def days(self) -> float:
        """What turns a total of the simulation into a figure per node and day."""
        return 86_400 / self.outcome.seconds / self.outcome.fleet.nodes

    @property
    def useful_share(self) -> float:
        """Share of node time whose tokens reach the committed model."""
        return self.outcome.goodput * min(self.outcome.merged_share, 1.0)


def costs(traffic: Traffic) -> Costs:
    """What the requests and downloads cost at list prices; deletes are free."""
    requests = (traffic.puts + traffic.lists) * DOLLARS_PER_PUT + traffic.gets * DOLLARS_PER_GET
    return Costs(requests, traffic.bytes_down * DOLLARS_PER_EGRESS_BYTE)


def preset(name: str, **overrides: object) -> DiLoCo:
    """A preset with what is given (not None) in place of its own."""
    given = {key: value for key, value in overrides.items() if value is not None}
    make = {
        "standard": DiLoCo.standard,
        "streaming": DiLoCo.streaming,
        "decoupled": DiLoCo.decoupled,
        "eager": DiLoCo.eager,
        "sparse": DiLoCo.sparse,
        "local_sgd": DiLoCo.local_sgd,
    }[name]
    return make(**given)


def fleet_of(
    settings: DiLoCo,
    *,
    nodes: int,
    parameters: int,
    bandwidth: float,
    latency: float,
    step_seconds: float,
    seconds: float,
    tokens: int = 1024,
    lease: float = LEASE_SECONDS,
    faults: Schedule = (),
) -> Fleet:
    """A fleet whose payloads weigh what those of a model of so many parameters do, each fragment an equal part."""
    elements = -(-parameters // settings.fragments)
    return Fleet(
        nodes=nodes,
        settings=settings,
        seconds=seconds,
        step_seconds=step_seconds,
        tokens=tokens,
        weather=Weather(latency=latency, bandwidth=bandwidth, ordered=True),
        lease=lease,
        delta_bytes=sum(part.nbytes for part in codec_named(settings.delta_codec).parts(elements)),
        commit_bytes=elements * (2 if settings.master_dtype in HALF else 4),
        faults=faults,
    )


def answer(question: Question, name: str) -> Row:
    """Play one preset for a few of its cycles."""
    settings = preset(name)
    nodes = min(question.nodes, NODES_MOST)
    fleet = fleet_of(
        settings,
        nodes=nodes,
        parameters=question.parameters,
        bandwidth=question.bandwidth,
        latency=question.latency,
        step_seconds=question.step_seconds,
        seconds=0.0,
        tokens=question.tokens,
    )
    seconds = CYCLES * max(settings.sync_every * question.step_seconds, closing_seconds(fleet))
    faults = failures(nodes, seconds, question.mtbf, question.down, seed=0) if question.mtbf is not None else ()
    return Row(name, settings, run(replace(fleet, seconds=seconds, faults=faults, jitter=0.05)))


def closing_seconds(fleet: Fleet) -> float:
    """What one cycle takes of a closer's line: the snapshots of its fragments, and their commits up and down."""
    fragments = fleet.settings.fragments
    held = fragments / min(fragments, fleet.nodes)
    up, down = 2 * held * fleet.commit_bytes, held * fleet.nodes * fleet.delta_bytes + fragments * fleet.commit_bytes
    return (up + down) / fleet.weather.bandwidth


def recommended(rows: Sequence[Row]) -> tuple[Row, str]:
    """The row to start from, and why."""
    best = max(rows, key=lambda row: row.useful_share)
    near = [row for row in rows if row.useful_share >= ENOUGH * best.useful_share]
    chosen = min(near, key=lambda row: (row.dollars_per_node_day + row.egress_dollars_per_node_day, row.preset))
    why = f"{chosen.useful_share:.0%} of node time ends up in the model"
    if chosen is not best:
        why += f", within {1 - ENOUGH:.0%} of {best.preset}, at the least cost of those"
    return chosen, why


def longer_cycle(row: Row, question: Question) -> int | None:
    """A ``sync_every`` at which the line keeps up, if it does not at the preset's; None if it does."""
    needed = closing_seconds(replace(row.outcome.fleet, nodes=question.nodes)) / question.step_seconds
    return None if needed <= row.settings.sync_every else math.ceil(needed / 10) * 10


def parameters_of(path: Path) -> int:
    """Parameters of the model that a Hugging Face ``config.json`` describes: embeddings, attention, MLPs, norms.

    Raises :class:`ConfigurationError` for a file that does not say enough.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is no model configuration: {error}.", "Give a config.json.") from None
    config = raw.get("text_config", raw) if isinstance(raw, dict) else {}
    hidden = _integer(config, "hidden_size", "n_embd", "d_model")
    layers = _integer(config, "num_hidden_layers", "n_layer", "num_layers")
    vocabulary = _integer(config, "vocab_size")
    if not hidden or not layers or not vocabulary:
        raise ConfigurationError(
            f"{path} names no hidden size, layers and vocabulary.", "Give --parameters, such as 1.5B, instead."
        )
    return _embeddings(config, hidden, vocabulary) + layers * _layer(config, hidden) + hidden


def _embeddings(config: Mapping[str, object], hidden: int, vocabulary: int) -> int:
    tied = config.get("tie_word_embeddings", "n_embd" in config)
    learned = _integer(config, "n_positions") if "n_embd" in config else 0
    return hidden * (vocabulary * (1 if tied else 2) + learned)


def _layer(config: Mapping[str, object], hidden: int) -> int:
    heads = _integer(config, "num_attention_heads", "n_head") or 1
    groups = _integer(config, "num_key_value_heads") or heads
    width = _integer(config, "head_dim") or hidden // heads
    attention = hidden * width * (2 * heads + 2 * groups)
    inner = _integer(config, "intermediate_size", "n_inner", "d_ff") or 4 * hidden
    experts = _integer(config, "num_local_experts", "num_experts", "n_routed_experts") or 1
    inner = _integer(config, "moe_intermediate_size") or inner if experts > 1 else inner
    matrices = 2 if "n_embd" in config or config.get("hidden_act") in ("gelu", "relu") else 3
    return attention + matrices * hidden * inner * experts + 2 * hidden + (hidden * experts if experts > 1 else 0)


def _integer(config: Mapping[str, object], *names: str) -> int:
    """The first of these fields that holds a whole number above 0, or 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), 0)
