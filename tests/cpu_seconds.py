"""CPU seconds of the tests, and slices of the slow ones that take about the same.

A plugin of conftest. A test's seconds are those of its process and of the processes that ended in
the meantime. The last line of a run has the sum, with collection, and the ten costliest files;
`.ci/run` reads it.
"""

import resource
from collections import Counter
from pathlib import Path

import pytest

# Of slow functions that take FEW or more, as `--slow --record` measured them; others count as FEW.
RECORD, FEW = Path(__file__).with_name("slow_seconds.txt"), 2
SPENT: Counter[str] = Counter()  # by test, of all workers in the process that reports
SLOW = ("slow", "faults", "soak")


def pytest_addoption(parser):
    text = "of the slow tests, the k-th of N parts that take about the same CPU seconds"
    parser.addoption("--slice", metavar="k/N", help=text)
    text = f"write the CPU seconds of the slow tests that ran to {RECORD.name}"
    parser.addoption("--record", action="store_true", help=text)


def used() -> float:
    """User and system seconds of this process and of those that it waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def function_of(test: str) -> str:
    return test.partition("[")[0]


def recorded() -> dict[str, int]:
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return {name: int(seconds) for seconds, name in map(str.split, lines)}


def part(functions: list[str], seconds: dict[str, int], number: int, count: int) -> set[str]:
    """The functions whose middle second is in this part of all seconds; neighbors stay together."""
    total = sum(seconds.get(function, FEW) for function in functions)
    found, before = set(), 0.0
    for function in functions:
        own = seconds.get(function, FEW)
        if int((before + own / 2) * count / total) + 1 == number:
            found.add(function)
        before += own
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not (wanted := config.getoption("--slice")):
        return
    number, count = map(int, wanted.split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--slice {wanted}, expected k/N with k from 1 to N")
    slow = [item for item in items if any(map(item.get_closest_marker, SLOW))]
    functions = list(dict.fromkeys(function_of(item.nodeid) for item in slow))
    chosen = part(functions, recorded(), number, count)
    kept = [item for item in slow if function_of(item.nodeid) in chosen]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = used()
    result = yield
    SPENT[item.nodeid] += used() - before
    return result


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_seconds"] = dict(SPENT)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    SPENT.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))


def pytest_terminal_summary(terminalreporter):
    files = sums(SPENT, lambda test: test.partition("::")[0])
    ten = ", ".join(f"{name} {seconds:.0f}" for name, seconds in files.most_common(10))
    terminalreporter.write_line(f"CPU seconds: {used():.0f} in all; {ten}")


def sums(seconds: dict[str, float], of) -> Counter[str]:
    found: Counter[str] = Counter()
    for test, value in seconds.items():
        found[of(test)] += value
    return found


def pytest_unconfigure(config):
    """After conftest has compared the checkout."""
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        known = recorded() | sums(SPENT, function_of)
        lines = [f"{round(known[name])} {name}" for name in sorted(known) if known[name] >= FEW]
        RECORD.write_text("\n".join(lines) + "\n")
