"""Break the code one line at a time, and see that the tests notice.

    python tools/mutations.py                  # every fault of tests/mutations.yaml, two at a time
    python tools/mutations.py --only launch    # those with that word in the fault or the file

First all named tests run unchanged in a copy of the working tree, where they must pass. Then each
fault is put into a copy, and the test that stands beside it must fail there: by itself, not in a
fixture, and within the time limit. The working tree itself is only read.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.yaml"
LIMIT_S = 300.0  # for one test
PR_SET_CHILD_SUBREAPER = 36

_tree = Path()  # of this worker: a copy of the working tree


@dataclass(frozen=True)
class Fault:
    """One entry of the table."""

    fault: str
    file: str
    line: str
    becomes: str
    test: str

    def problem(self) -> str | None:
        """Why it cannot be tried."""
        for name in (self.file, self.test.partition("::")[0]):
            if not (ROOT / name).is_file():
                return f"there is no {name}"
        times = (ROOT / self.file).read_text().count(self.line)
        return None if times == 1 else f"its line occurs {times} times in {self.file}"


def copy_tree(target: Path) -> Path:
    """What git tracks, as it stands, and what is new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def begin(trees: Any) -> None:
    """A worker takes its tree. What its tests leave behind becomes its child, whoever started it."""
    global _tree
    _tree = trees.get()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    look = [sys.executable, "-c", "import muster; print(muster.__file__)"]
    found = subprocess.run(look, env=environment(), capture_output=True, text=True).stdout
    assert found.startswith(str(_tree)), f"{found or 'nothing'} is imported instead of the copy"


def environment() -> dict[str, str]:
    """The copy is what is imported; temporary files go when it goes."""
    temporary = _tree.with_suffix(".tmp")
    temporary.mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": str(_tree / "src"), "TMPDIR": str(temporary)}


def pytest(tests: Sequence[str], *options: str, limit_s: float = LIMIT_S) -> tuple[int | None, str]:
    """Exit code, None after `limit_s`, and all that was said. No process is left behind."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    with _tree.with_suffix(".out").open("w+") as out:
        process = subprocess.Popen(
            [*command, *tests],
            cwd=_tree,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            end_children()
        out.seek(0)
        return code, out.read()


def end_children() -> None:
    """The children of one that ends become this process's own: until there are none left."""
    for _ in range(20):
        if not (left := psutil.Process().children(recursive=True)):
            return
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=5)


def is_of(words: str, test: str) -> bool:
    """Whether pytest's words are of this test, or of one of its rows."""
    return f"{words} ".startswith((f"{test} ", f"{test}["))


def unchanged(tests: Sequence[str]) -> dict[str, str]:
    """Which of these tests do not pass as they are, and what was said of them."""
    code, said = pytest(tests, "-rpfEs", limit_s=LIMIT_S * len(tests))
    lines = [line.partition(" ")[::2] for line in said.splitlines()]
    unknown = f"not found: {_tree}/"
    gone = [words.removeprefix(unknown) for _, words in lines if words.startswith(unknown)]
    if rest := [test for test in tests if gone and not any(is_of(test, one) for one in gone)]:
        lost = dict.fromkeys(set(tests) - set(rest), "there is no such test")
        return lost | unchanged(rest)  # pytest has run none of them
    passed = [words for how, words in lines if how == "PASSED"]
    bad = [words for how, words in lines if how in ("FAILED", "ERROR", "ERROR:", "SKIPPED")]
    found = {}
    for test in tests:
        own = [words for words in bad if is_of(words, test)]
        if own or not any(is_of(words, test) for words in passed):
            found[test] = "; ".join(own or bad[:3]) or f"pytest's exit code is {code}"
    return found


def attempt(fault: Fault) -> tuple[str, float]:
    """`caught`, or what happened instead, and the seconds that took."""
    path, began = _tree / fault.file, time.monotonic()
    before, compiled = path.read_text(), Path(cache_from_source(str(path)))
    try:
        path.write_text(before.replace(fault.line, fault.becomes))
        compiled.unlink(missing_ok=True)
        code, said = pytest([fault.test], "-x", "-rfE")
    finally:
        path.write_text(before)
        compiled.unlink(missing_ok=True)
    lines = [line.partition(" ")[::2] for line in said.splitlines()]
    if any(how == "FAILED" and is_of(words, fault.test) for how, words in lines):
        verdict = "caught"
    elif code is None:
        verdict = f"not ended after {LIMIT_S:.0f} s"
    else:
        verdict = f"survived, pytest's exit code is {code}"
    return verdict, time.monotonic() - began


def chosen(arguments: argparse.Namespace) -> tuple[list[Fault], list[str]]:
    """The faults to try, and what is wrong with others."""
    faults, problems = [], []
    for fault in (Fault(**entry) for entry in yaml.safe_load(TABLE.read_text())):
        if arguments.only not in fault.fault and arguments.only not in fault.file:
            continue
        if words := fault.problem():
            problems.append(f"{fault.fault}: {words}")
        else:
            faults.append(fault)
    return faults, problems


def run(pool: ProcessPoolExecutor, faults: list[Fault], jobs: int) -> list[str]:
    """All of them; returns what was not caught, or cannot be."""
    tests = sorted({fault.test for fault in faults})
    share = -(-len(tests) // jobs) or 1
    parts = [tests[i : i + share] for i in range(0, len(tests), share)]
    broken: dict[str, str] = {}
    for found in pool.map(unchanged, parts):
        broken |= found
    print(f"{len(tests) - len(broken)} of {len(tests)} tests pass unchanged", flush=True)
    failed = [
        f"{f.fault}: {f.test} does not pass unchanged: {broken[f.test]}"
        for f in faults
        if f.test in broken
    ]
    tried = {pool.submit(attempt, fault): fault for fault in faults if fault.test not in broken}
    for future in as_completed(tried):
        fault, (verdict, seconds) = tried[future], future.result()
        print(f"{verdict}, {seconds:.0f} s: {fault.fault}", flush=True)
        if verdict != "caught":
            failed.append(f"{verdict}: {fault.fault} ({fault.file}; {fault.test})")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="in the fault or its file")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="copies at work at once")
    arguments = parser.parse_args()
    faults, failed = chosen(arguments)
    wanted, context = len(faults) + len(failed), mp.get_context("fork")
    trees = context.Queue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for number in range(arguments.jobs):
            trees.put(copy_tree(Path(folder) / str(number)))
        with ProcessPoolExecutor(arguments.jobs, context, begin, (trees,)) as pool:
            try:
                failed += run(pool, faults, arguments.jobs)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    if failed:
        print("\nNot caught:", *failed, sep="\n  ")
    print(f"{wanted - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
