"""Switch the checks of a module off, one at a time, and name the first test that notices.

A check is an ``if`` in a function that does nothing but raise. Tests are collected once; each check is
switched off in a fork of that process, so nothing is written and nothing is imported again::

    python tools/switched_off.py src/fedmerit/secagg/client.py tests/secagg --every 3

prints a line per check: where it is, and the test that failed, or NOTHING. Whoever merges tests of a module
runs it before and after: no check may change to NOTHING.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.main import pytest_runtestloop as run_all


def checks(tree: ast.Module) -> list[ast.If]:
    """Return every ``if`` whose body does nothing but raise, in order."""
    found = (
        node for node in ast.walk(tree) if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
    )
    return sorted(found, key=lambda node: node.lineno)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all that it holds."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from codes(one)


def switch_off(path: Path, line: int) -> None:
    """Give every function of a module that is loaded the code that it has without one check."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (check,) = (one for one in checks(tree) if one.lineno == line)
    check.test = ast.copy_location(ast.Constant(value=False), check.test)
    made = {(one.co_qualname, one.co_firstlineno): one for one in codes(compile(tree, str(path), "exec"))}
    gc.unfreeze()  # what `conftest.py` froze is among no objects
    given = 0
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename == str(path):  # asks no lazy object
            key = (one.__code__.co_qualname, one.__code__.co_firstlineno)
            if key in made and made[key].co_freevars == one.__code__.co_freevars:
                given += one.__code__ != made[key]
                one.__code__ = made[key]
    if not given:
        raise LookupError(f"{path}:{line} is in no function that the tests have loaded")


class Campaign:
    """A plugin of pytest: in the place of its one loop over all tests, a loop for each check."""

    def __init__(self, path: Path, every: int, first: int, seconds: float) -> None:
        self.path, self.every, self.first, self.seconds = path, every, first, seconds
        self.failed, self.lost = "", 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        source = self.path.read_text(encoding="utf-8")
        for check in checks(ast.parse(source))[self.first :: self.every]:
            what = " ".join((ast.get_source_segment(source, check.test) or "").split())
            test = self.without(session, check.lineno)
            self.lost += not test
            sys.__stderr__.write(f"{self.path.name}:{check.lineno} `{what[:90]}` -> {test or 'NOTHING'}\n")
        return True

    def without(self, session: pytest.Session, line: int) -> str:
        """Return the first test that fails without the check; "" if none does."""
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            session.config.option.maxfail = 1
            try:
                switch_off(self.path, line)
                run_all(session)
            except pytest.Session.Failed as error:  # pytest stops at the first failure by raising
                self.failed = self.failed or repr(error)
            except BaseException as error:
                self.failed = f"(no campaign: {error!r})"
            os.write(into, self.failed.encode()[:4000])
            os._exit(0)
        os.close(into)
        ends = time.monotonic() + self.seconds
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > ends:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "(no end)"
            time.sleep(0.05)
        with os.fdopen(out, "rb") as answer:
            found = answer.read().decode()
        if found.startswith("(no campaign"):
            raise RuntimeError(f"line {line}: {found}")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--every", type=int, default=1, help="one check in so many")
    parser.add_argument("--first", type=int, default=0, help="begin with this check")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the tests of a check may take")
    given = parser.parse_args()
    campaign = Campaign(given.module.resolve(), given.every, given.first, given.seconds)
    quick = ["-q", "-p", "no:cacheprovider", "-m", "not long and not alone"]
    pytest.main([*quick, *given.tests], plugins=[campaign])
    return campaign.lost > 0


if __name__ == "__main__":
    sys.exit(main())
