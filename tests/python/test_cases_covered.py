"""Every public bug report in tests/data/cases.txt has a test that names it, or a reason in cases_left.toml."""

import functools
import re
import tomllib
from pathlib import Path

from server import ROOT

CASES = [line.split("\t")[0] for line in (ROOT / "tests" / "data" / "cases.txt").read_text().splitlines()[1:]]
LEFT = tomllib.loads((Path(__file__).parent / "cases_left.toml").read_text())
# A test function whose name carries the case, as test_http_05_... or cfg_05_...
NAMED = re.compile(r"\b(?:def|fn) (?:test_)?(?:\w+_)??([a-z]+)_(\d{2})(?:_\w*)?\s*\(")


@functools.cache
def named_cases() -> set[str]:
    found = set()
    for folder, pattern in (("tests", "*.py"), ("tests", "*.rs"), ("crates", "*.rs"), ("backends", "*.rs")):
        for path in (ROOT / folder).rglob(pattern):
            for area, number in NAMED.findall(path.read_text(errors="replace")):
                found.add(f"{area.upper()}-{number}")
    return found


def test_every_case_is_tested_or_has_a_reason():
    missing = [case for case in CASES if case not in named_cases() and case not in LEFT]
    assert not missing, f"neither tested nor in cases_left.toml: {missing}"


def test_no_case_is_both_tested_and_left():
    assert not sorted(set(LEFT) & named_cases())


def test_only_known_cases_are_left_and_each_has_a_reason():
    assert not sorted(set(LEFT) - set(CASES))
    assert all(isinstance(reason, str) and len(reason) > 20 for reason in LEFT.values())
