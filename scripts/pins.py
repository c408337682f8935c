"""Writes ``requirements/*.txt`` from what is installed here: each file pins one extra of the project and all it needs.

Local version labels such as ``+cpu`` are dropped, so that every platform finds its own build of the
same release. Packages that one platform needs beyond these (CUDA libraries) are left to pip.
"""

import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FILES = {"demo": ("demo",), "dev": ("dev",)}


def declared(extras: Iterable[str]) -> Iterator[Requirement]:
    """What builds the project, and what it needs with ``extras``, following extras that name other extras."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    yield from map(Requirement, settings["build-system"]["requires"] + settings["project"]["dependencies"])
    yield from optional(settings["project"], extras)


def optional(project: Mapping[str, Any], extras: Iterable[str]) -> Iterator[Requirement]:
    """The requirements of the project's ``extras``."""
    for extra in extras:
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == project["name"]:
                yield from optional(project, requirement.extras)
            else:
                yield requirement


def needed(requirements: Iterable[Requirement]) -> dict[str, str]:
    """The installed version of each requirement and of everything it needs here."""
    waiting, seen, found = deque(requirements), set[tuple[str, frozenset[str]]](), dict[str, str]()
    while waiting:
        requirement = waiting.popleft()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        installed = installed_distribution(name)
        found[name] = installed.version.partition("+")[0]
        children = map(Requirement, installed.requires or ())
        waiting.extend(child for child in children if applies(child, extras))
    return found


def installed_distribution(name: str) -> Distribution:
    """The package's metadata; its absence ends this process with a sentence."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise SystemExit(f"{name} is needed but not installed: install it, then pin.") from None


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether the requirement's marker holds here, without extras or with any of ``extras``."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def main() -> None:
    """Rewrite every file."""
    for name, extras in FILES.items():
        pins = needed(declared(extras))
        lines = [f"{package}=={version}" for package, version in sorted(pins.items())]
        path = ROOT / "requirements" / f"{name}.txt"
        path.write_text("# Written by scripts/pins.py; do not edit.\n" + "\n".join(lines) + "\n")
        print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    main()
