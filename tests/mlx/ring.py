"""Two MLX processes on this machine, connected in a ring."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def on_two_ranks(out: Path, **options: Any) -> list[dict[str, Any]]:
    """Run the program on both ranks; what each of them found."""
    hosts = out / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    command = [sys.executable, "-m", "tests.mlx.ranks_program", json.dumps({**options, "out": str(out)})]
    places = os.pathsep.join([str(ROOT / "core"), str(ROOT)])
    common = {**os.environ, "MLX_HOSTFILE": str(hosts), "PYTHONPATH": places}
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**common, "MLX_RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
