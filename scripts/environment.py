"""Makes ``.venv`` hold exactly the pinned packages of one requirements file, and nothing when it already does.

Torch is installed first, because a later requirement that merely tolerates several versions would
otherwise choose another build. A stamp names what was installed, so a second run costs a hash. The
mark ``.incomplete`` stands while packages are being written: a run that finds it starts a fresh
environment, since an interrupted install can look finished to pip. One lock keeps two makes apart.

The developers' environment also gets Azure's emulator, which only npm has. It is wanted by tests that say so
when it is missing, so a machine without npm, or an npm without a network, fails nothing here.
"""

import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
INCOMPLETE = ENVIRONMENT / ".incomplete"
OLDEST = (3, 11)
AZURITE = "azurite@3.37.0"
AZURITE_FOLDER = ENVIRONMENT / "azurite"


def fingerprint(requirements: Path) -> str:
    """sha256 over everything the environment depends on: pins, package metadata, the interpreter."""
    inputs = [requirements.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), platform.python_version().encode()]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()


def torch_pin(requirements: Path) -> str:
    """The file's line that pins torch."""
    return next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))


def pip(*arguments: str) -> None:
    """Run the environment's pip; its failure ends this process with its exit code."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-qq", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(f"Installing failed (pip exit code {code}); run make again to start over from a fresh .venv.")


def create() -> None:
    """An empty environment, marked incomplete from before its first file exists."""
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    ENVIRONMENT.mkdir()
    INCOMPLETE.touch()
    try:
        venv.create(ENVIRONMENT, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError:
        sys.exit(f"{sys.executable} cannot create environments; install its venv and ensurepip modules.")


def install(requirements: Path) -> None:
    """Create the environment where it is missing or half-written, then install: torch, pins, this project."""
    if INCOMPLETE.exists() or not PYTHON.exists():
        create()
    INCOMPLETE.touch()
    print(f"Installing {torch_pin(requirements)} into .venv", flush=True)
    pip(torch_pin(requirements))
    print(f"Installing {requirements.relative_to(ROOT)} into .venv", flush=True)
    pip("-r", str(requirements))
    pip("--no-deps", "--no-build-isolation", "--editable", ".")
    INCOMPLETE.unlink()


def install_azurite() -> None:
    """Put Azure's emulator into its folder of the environment, where there is an npm to do it."""
    npm, stamp = shutil.which("npm"), AZURITE_FOLDER / ".installed"
    if npm is None or (stamp.exists() and stamp.read_text() == AZURITE):
        return
    print(f"Installing {AZURITE} into .venv", flush=True)
    shutil.rmtree(AZURITE_FOLDER, ignore_errors=True)
    AZURITE_FOLDER.mkdir()
    options = ["--no-audit", "--no-fund", "--no-update-notifier", "--ignore-scripts", "--loglevel=error"]
    command = [npm, "install", "--prefix", str(AZURITE_FOLDER), *options, AZURITE]
    if subprocess.run(command, cwd=AZURITE_FOLDER, stdout=subprocess.DEVNULL, check=False).returncode:
        print(f"npm could not install {AZURITE}: the tests of Azure will be skipped.", flush=True)
    else:
        stamp.write_text(AZURITE)


def main(name: str) -> None:
    """Bring ``.venv`` to ``requirements/{name}.txt``, printing only when there is work to do."""
    if sys.version_info < OLDEST:
        sys.exit("Python 3.11 or newer is needed: run `make PYTHON=python3.11 ...`.")
    requirements = ROOT / "requirements" / f"{name}.txt"
    stamp, wanted = ENVIRONMENT / f".installed-{name}", fingerprint(requirements)
    with (ROOT / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if INCOMPLETE.exists() or not stamp.exists() or stamp.read_text() != wanted:
            install(requirements)
            stamp.write_text(wanted)
        if name == "dev":
            install_azurite()


if __name__ == "__main__":
    main(sys.argv[1])
