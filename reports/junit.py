"""records -> junit.xml, for the pages of a CI system. One test case a verdict: a failure fails, a gate not run is skipped.

Suite `gates` holds exactly the run's verdicts. A run that is not whole adds suite `run` with one error, because a page that
counts skips as success, or finds no case at all, would show it green. Tests: parity/unit/test_reports.py.
"""

from __future__ import annotations

from xml.etree import ElementTree

from probes.core.records import Header, State, Summary, Verdict
from reports import words


def _case(suite: ElementTree.Element, verdict: Verdict, typed: str) -> None:
    covered = words.steps(verdict.step_first, verdict.step_last)
    case = ElementTree.SubElement(
        suite, "testcase",
        classname=words.printable(f"parity.{verdict.mode}" + (f".{verdict.phase}" if verdict.phase else "")),
        name=words.printable(" ".join(part for part in (verdict.point, verdict.gate, covered) if part)),
    )  # fmt: skip
    numbers = (
        f"{verdict.metric} {words.number(verdict.value)}, limit {words.number(verdict.limit)}, "
        f"{words.share(verdict.spent)} of it spent, floor {words.number(verdict.floor)}"
    )
    if verdict.state is State.FAIL:
        failure = ElementTree.SubElement(case, "failure", message=words.printable(verdict.reason or numbers), type=words.printable(verdict.metric))
        failure.text = words.printable(f"{numbers}\n{verdict.why}\n{words.command(verdict.test_id, typed)}\n")
    elif verdict.state is State.NOT_RUN:
        ElementTree.SubElement(case, "skipped", message=words.printable(f"not run: {verdict.reason or 'no reason given'}"))
    else:
        ElementTree.SubElement(case, "system-out").text = words.printable(numbers)


def junit_xml(header: Header, verdicts: list[Verdict], summary: Summary | None, verdict: str, reason: str) -> bytes:
    """The document. verdict and reason are the report's own, so that both pages say the same."""
    failed = sum(v.state is State.FAIL for v in verdicts)
    skipped = sum(v.state is State.NOT_RUN for v in verdicts)
    broken = verdict == "incomplete"
    seconds = f"{summary.seconds if summary else 0.0:.3f}"
    root = ElementTree.Element(
        "testsuites", name="dsv4-parity", tests=str(len(verdicts) + broken), failures=str(failed),
        errors=str(int(broken)), skipped=str(skipped), time=seconds,
    )  # fmt: skip
    suite = ElementTree.SubElement(
        root, "testsuite", name="gates", tests=str(len(verdicts)), failures=str(failed), errors="0", skipped=str(skipped),
        time=seconds, timestamp=words.printable(header.started),
    )  # fmt: skip
    properties = ElementTree.SubElement(suite, "properties")
    facts = {
        "verdict": verdict, "reason": reason, "checkpoint": header.checkpoint, "checkpoint_hash": header.checkpoint_hash,
        "device": header.device, "commit": header.commit + ("+dirty" if header.dirty else ""), "command": header.command,
    }  # fmt: skip
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=name, value=words.printable(value))
    for one in verdicts:
        _case(suite, one, header.command)
    if broken:
        run = ElementTree.SubElement(root, "testsuite", name="run", tests="1", failures="0", errors="1", skipped="0", time="0")
        case = ElementTree.SubElement(run, "testcase", classname="parity.run", name="the run is whole")
        ElementTree.SubElement(case, "error", message=words.printable(reason), type="incomplete")
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"
