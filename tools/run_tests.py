"""Runs every test of the project, in order of cost, and stops at the first step that fails.

The last line is `N passed, N failed`, summed over all suites. A step without a count of its own (the
format, the lints, a build) counts as one. `--list` names the steps; arguments choose some of them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target" / "release" / "trireme"
PYTHON = sys.executable

# How the suites close: nextest, cargo test, pytest, and our own programs.
COUNTS = [
    re.compile(r"^\s*Summary \[.*\] +\d+ tests? run: (?P<passed>\d+) passed(?:.*?, (?P<failed>\d+) failed)?", re.M),
    re.compile(r"^test result: \w+\. (?P<passed>\d+) passed; (?P<failed>\d+) failed", re.M),
    re.compile(r"^=+ (?:(?P<failed>\d+) failed(?:, )?)?(?:(?P<passed>\d+) passed)?.* in [\d.]+s.*=+$", re.M),
    re.compile(r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed$", re.M),
]
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]


def steps() -> list[Step]:
    """All steps, the cheapest first."""
    cargo = os.environ.get("CARGO", "cargo")
    nextest = shutil.which("cargo-nextest") is not None
    unit = ["nextest", "run", "--no-fail-fast"] if nextest else ["test", "--all-targets", "--no-fail-fast"]
    return [
        Step("format", [cargo, "fmt", "--all", "--check"]),
        Step("tidy", [cargo, "xtask", "tidy"]),
        Step("lints", [cargo, "clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-Dwarnings"]),
        Step("rust", [cargo, *unit, "--workspace", "--locked"]),
        Step("doc-tests", [cargo, "test", "--doc", "--workspace", "--locked", "--quiet"]),
        Step("generated-code", [cargo, "xtask", "codegen", "--check"]),
        Step("descriptors", [PYTHON, "tests/python/descriptors.py"]),
        Step("binary", [cargo, "build", "--release", "--locked", "--package", "trireme"]),
        Step("python", [PYTHON, "-m", "pytest", "tests/python"]),
        Step("golden", [PYTHON, "tests/golden/replay.py"]),
    ]


def run(step: Step, environment: dict[str, str]) -> tuple[int, int]:
    """Runs one step with its output passed on, and returns how many tests passed and failed."""
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    output = []
    for line in process.stdout:
        # Only the very last line of all may look like the closing line.
        shown = line if not COUNTS[-1].match(line) else f"| {line}"
        sys.stdout.write(shown)
        sys.stdout.flush()
        output.append(line)
    code = process.wait()
    text = COLOUR.sub("", "".join(output))
    passed = failed = 0
    counted = False
    for match in (match for pattern in COUNTS for match in pattern.finditer(text)):
        counted = True
        passed += int(match["passed"] or 0)
        failed += int(match["failed"] or 0)
    if code != 0:
        return passed, max(failed, 1)
    return (passed, failed) if counted else (1, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="steps to run; all when none is named")
    parser.add_argument("--list", action="store_true", help="print the steps and their commands")
    arguments = parser.parse_args()
    chosen = steps()
    if arguments.list:
        for step in chosen:
            print(f"{step.name:16} {' '.join(step.command)}")
        return 0
    if unknown := set(arguments.names) - {step.name for step in chosen}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in chosen)}")
    environment = dict(os.environ, TRIREME=str(BINARY), CARGO_TERM_COLOR="never")
    environment.setdefault("TRIREME_ONNXRUNTIME", str(ROOT / ".trireme/onnxruntime/libonnxruntime.so"))
    passed = failed = 0
    for step in chosen:
        if arguments.names and step.name not in arguments.names:
            continue
        print(f"--- {step.name}", flush=True)
        begin = time.monotonic()
        step_passed, step_failed = run(step, environment)
        passed += step_passed
        failed += step_failed
        print(f"--- {step.name}: {'failed' if step_failed else 'ok'} in {time.monotonic() - begin:.0f} s", flush=True)
        if step_failed:
            break
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
