"""Commands on runs: run, demo, init, plan, page; and on their ledgers: verify, export."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option

from fedmerit.cli import base
from fedmerit.cli.base import app, err, fail, form_of, heading_of, out, write_json
from fedmerit.config import SCHEMA, Config, asked_for, of_folder, written
from fedmerit.errors import ConfigError, DataError, FedmeritError, MissingExtra, StoreError, UndefinedShares
from fedmerit.ledger.chain import LEDGER
from fedmerit.ledger.run import Run
from fedmerit.notes import Note, install, words

# ------------------------------------------------------------------------------------------------ the page


@app.command()
def page(
    source: Annotated[Path, Argument(metavar="SOURCE")],
    out_: Annotated[
        Path | None,
        Option(
            "--out",
            help="Where to write it.",
            show_default="DIR/page-TITLE-DIR.html, or FILE.html for FILE.csv",
        ),
    ] = None,
    title: base.Title = None,
    date: base.Date = None,
    currency: base.Currency = None,
    language: base.Language = None,
    force: base.Force = False,
) -> None:
    """Write one HTML page that anybody can open: who contributed what, how sure that is, who is paid what.

    SOURCE is a run folder, a file of reports (.csv, .xlsx or .json), or with --out - for a file on standard
    input.
    """
    from fedmerit.notes import speaking
    from fedmerit.report.page.html import check_target, facts_of, page_path, render, source_id
    from fedmerit.report.terminal import counting, tell_notes, warn
    from fedmerit.storage.run_folder import write

    heading = heading_of(currency, title=title, date=date)
    if str(source) == "-" and out_ is None:
        fail("-: expected --out FILE.html, because standard input has no name")
    target = out_ or (source if source.is_dir() else source.with_suffix(".html"))
    with speaking(language or "en"), counting(err, "page", 2) as done:
        with base.on_disk(source) as there:
            facts = facts_of(there, form=form_of(), heading=heading)
        done()
        if out_ is None and facts.source.run is not None and _renewed(source, facts.source.run):
            facts = facts_of(source, heading=heading)
        if out_ is None and source.is_dir():
            target = page_path(source, facts.source.heading)
        check_target(target, source_id(facts) if out_ else "", force=force)
        write(target, render(facts).encode())
        done()
    out.print(f"wrote {target}")
    tell_notes(out, facts.source.notes)
    broken = [f"the ledger does not verify: {facts.source.broken}"] if facts.source.broken else []
    warn(out, [*facts.doubts, *broken])
    if facts.source.private:
        out.print(words("file.private", path=target))


def _renewed(folder: Path, run: Run) -> bool:
    """Rewrite score files that are older than the ledger; return whether any were, and print any refusal."""
    from fedmerit.storage.checks import renew

    try:
        done = renew(folder, run)
    except StoreError as error:
        done = ""
        out.print(f"score files were left as they are: {error}")
    if done:
        out.print(done)
    return bool(done)


# ----------------------------------------------------------------------------- a federation in one process


@app.command()
def run(
    config: Path,
    out_: Annotated[Path, Option("--out", help="The run folder.")],
    resume: Annotated[bool, Option("--resume", help="Continue the run in that folder.")] = False,
    set_: base.Set = None,
    repeat: Annotated[
        int | None,
        Option(
            min=2,
            help="Train this many times, in DIR/run-1, DIR/run-2, ...: with the same data and test pool, but "
            "other first models and batch orders; then compare the runs.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a federation on this machine under secure aggregation, and score every member.

    CONFIG is a file of settings (TOML); an empty file takes all defaults. `fedmerit init` writes one.
    """
    from fedmerit.config import load

    settings = load(config, set_ or ())
    with _settings_of(config, set_ or ()):
        if repeat is None:
            with _stoppable(out_):
                _run(settings, out_, resume=resume)
        else:
            _repeat(settings, out_, repeat, resume=resume)


def _repeat(config: Config, folder: Path, count: int, *, resume: bool) -> None:
    """Train several times on the same data, each time in a folder of its own, and compare the runs."""
    from fedmerit.report.comparison import compared
    from fedmerit.report.page.html import installed, render_comparison
    from fedmerit.report.terminal import print_comparison
    from fedmerit.storage.run_folder import PAGE, repeats_in
    from fedmerit.storage.run_folder import write as write_file

    if config.run.repeat != 1:
        raise ConfigError.at("run.repeat", f"expected 1 with --repeat, got {config.run.repeat}")
    if config.judged:
        raise ConfigError.at("scoring.method", "a panel has no test set by which repeats could be compared")
    planned = repeats_in(folder, config, count, resume=resume)
    for one in planned:
        out.print(f"run {one.number} of {count}: {one.folder}")
        first = planned[0].folder if one.number > 1 else None
        with _stoppable(one.folder):
            _run(one.config, one.folder, resume=one.begun, repeats=first)
    found = compared([one.folder for one in planned])
    print_comparison(out, found)
    if installed():
        write_file(folder / PAGE, render_comparison(found).encode())
        out.print(words("file.comparison", path=folder / PAGE))
    else:
        out.print(
            words("file.install-comparison", install=install("page"), folder=folder, path=folder / PAGE)
        )


@app.command()
def demo(
    out_: Annotated[Path, Option("--out", help="The run folder.")] = Path("runs/demo"), set_: base.Set = None
) -> None:
    """Let six hospitals train together on fashion-mini; one has noisy labels. They judge each other, and one
    judge lies; then with a shared test set, and one lies about its score.

    Takes about a minute.
    """
    from fedmerit.config import from_dict
    from fedmerit.storage.run_folder import not_empty, remove
    from fedmerit.verify import verify_folder

    settings, liar = from_dict(DEMO, set_ or ()), Path(f"{out_}-liar")
    panel, judge = Path(f"{out_}-panel"), Path(f"{out_}-judge")
    # it starts afresh, and removes only runs of its hospitals
    for folder in filter(is_demo, (out_, liar, panel, judge)):
        if "decision" in _kinds(folder):
            fail(
                f"{folder}: holds a run with a decision, which the demo does not delete: choose another --out"
            )
        remove(folder)
    for folder in (out_, liar, panel, judge):
        if folder.is_dir() and any(folder.iterdir()):
            raise not_empty(folder)
    out.print("Six hospitals, secure aggregation on. 80% of Harbour's labels are random.")
    if settings.settles:
        with _stoppable(panel, on="fedmerit demo starts afresh"):
            _demo_panel(from_dict(DEMO | PANEL, set_ or ()), panel)
        with _stoppable(judge, on="fedmerit demo starts afresh"):
            _demo_judge(from_dict(DEMO | PANEL | FALSE_JUDGE, set_ or ()), panel, judge)
        out.print("Now with a test set that all of them are shown:")
    with _stoppable(out_, on="fedmerit demo starts afresh"):
        _run(settings, out_, resume=False)
        for line in verify_folder(out_):
            out.print(line)
        if settings.settles:
            _demo_liar(from_dict(DEMO | LIAR, set_ or ()), liar)
    out.print(f"next: fedmerit rewards {out_} --budget 10000.00")


def _demo_panel(config: Config, folder: Path) -> None:
    """Let the hospitals judge each other; say who helped whom, and who would be paid what."""
    from fedmerit.report.facts import Facts
    from fedmerit.report.payment import propose
    from fedmerit.report.source import read_source
    from fedmerit.report.terminal import print_proposal
    from fedmerit.storage.run_folder import ARCHIVE
    from fedmerit.verify import verify_folder

    out.print("First without a test set: each hospital judges the others on patients of its own.")
    _run(config, folder, resume=False)
    for line in verify_folder(folder, archive=folder / ARCHIVE):
        if line.code == "panel":
            out.print(line)
    try:
        print_proposal(out, propose(Facts(read_source(folder)), DEMO_BUDGET, {}, dry_run=True))
    except UndefinedShares as error:  # changed settings may leave nothing to pay by
        out.print(str(error))


def _demo_judge(config: Config, honest: Path, folder: Path) -> None:
    """Run the panel once more, with a judge that lies; say that it gains nothing."""
    from fedmerit.report.facts import Facts
    from fedmerit.report.page.html import page_of_run
    from fedmerit.report.payment import propose
    from fedmerit.report.source import read_source

    with _engine():
        from fedmerit.simulation.run import run as run_embedded
    run_embedded(config, folder)
    out.print(f"The same hospitals once more ({folder}): Elm judges falsely, in favour of Dale.")
    terms = {"despite_doubts": True}
    found = [propose(Facts(read_source(one)), DEMO_BUDGET, terms, dry_run=True) for one in (honest, folder)]
    for name in ("Elm", "Dale"):
        before, now = (f"{one.paid[name]:,}" for one in found)
        out.print(f"{name} would be paid {before} of {DEMO_BUDGET} before, and {now} now.")
    out.print(page_of_run(folder))


def _demo_liar(config: Config, folder: Path) -> None:
    """Run the hospitals once more, with one that lies about its score; say what the settlement shows."""
    from fedmerit.report.page.html import page_of_run
    from fedmerit.storage.run_folder import ARCHIVE
    from fedmerit.verify import verify_folder

    with _engine():
        from fedmerit.simulation.run import run as run_embedded
    run_embedded(config, folder)
    out.print(f"The same hospitals once more ({folder}): Elm states 1% more than its score.")
    for line in verify_folder(folder, archive=folder / ARCHIVE):
        if line.code.startswith("settlement"):
            out.print(line)
    out.print(page_of_run(folder))


PaperData = Literal["fashion-mini", "cifar10", "brain-mri", "isic2019", "pcam"]
"""Datasets of the paper, and one that is shipped and small."""


@app.command()
def init(
    path: Annotated[Path | None, Argument()] = None,
    paper: Annotated[
        PaperData | None,
        Option(help="Write the paper's protocol on this dataset, not every setting.", show_default=False),
    ] = None,
    csv: Annotated[bool, Option("--csv", help="Write a table of reports to fill in.")] = False,
    xlsx: Annotated[bool, Option("--xlsx", help="The same as a workbook.")] = False,
    member: Annotated[
        list[str] | None, Option(help="Of a table: a member; repeatable.", show_default="Member 1 to 3")
    ] = None,
    rounds: Annotated[int | None, Option(help="Of a table: how many rounds.", show_default="3")] = None,
    delimiter: Annotated[
        str | None, Option(help="With --csv: comma, semicolon, tab or bar.", show_default="comma")
    ] = None,
) -> None:
    """Write a commented config with every setting, for a first run; or the paper's protocol; or a table.

    PATH is the file to write. Its run takes about a minute and finds a member with wrong labels. With --paper
    it is a short config, whose run prints the paper's table of LOO, FP, EE and COS. With --csv or --xlsx it
    is a table of reports to fill in, which says what goes where and has one line per round and member;
    spreadsheet programs in most of Europe open a CSV file with --delimiter semicolon. A file that exists is
    never overwritten.
    """
    from fedmerit.identity import write_new

    if csv or xlsx:
        if paper or (csv and xlsx):
            fail("expected one of --csv, --xlsx and --paper")
        path = path or Path("reports.csv" if csv else "reports.xlsx")
        _write_template(path, ".csv" if csv else ".xlsx", member, rounds, delimiter)
        return
    for name, given in (("--member", member), ("--rounds", rounds), ("--delimiter", delimiter)):
        if given is not None:
            fail(f"{name}: expected together with --csv; a config has its own settings")
    path = path or Path("paper.toml" if paper else "fedmerit.toml")
    write_new(path, (paper_config(paper) if paper else commented_config()).encode())
    out.print(f"wrote {path}; next: fedmerit run {path} --out runs/{'paper' if paper else 'first'}")
    if not paper:
        out.print("your own data, model and metric: docs/bring-your-own.md and examples/bring-your-own")


def _write_template(
    path: Path, ending: str, members: Sequence[str] | None, rounds: int | None, delimiter: str | None
) -> None:
    """Write a table of reports to fill in."""
    from fedmerit.files.reports import REMARKS, template, template_csv
    from fedmerit.files.workbooks import workbook
    from fedmerit.identity import write_new

    if path.suffix.lower() != ending:
        fail(f"{path}: expected a name that ends in {ending}")
    if delimiter and ending != ".csv":
        fail("--delimiter: expected together with --csv; a workbook has cells of its own")
    table = template(members or [f"Member {k}" for k in range(1, 4)], 3 if rounds is None else rounds)
    if ending == ".csv":
        write_new(path, template_csv(table, form_of(delimiter).delimiter or ",").encode())
    else:
        write_new(path, workbook({"Reports": table}, notes=range(2, 2 + REMARKS)))
    lines = f"{len(table) - 1 - REMARKS} lines, as the first two explain"
    out.print(f"wrote {path}: fill in {lines}; next: fedmerit score {path}")


@app.command()
def plan(config: Path, set_: base.Set = None, format: base.PlainFormat = "table") -> None:
    """Show what a run will cost here (models, trainings, minutes, memory, bytes) and what it can resolve.

    CONFIG is a file of settings (TOML), as for `fedmerit run`.
    """
    from fedmerit.config import load
    from fedmerit.report.terminal import counting, print_plan, tell_notes

    settings = load(config, set_ or ())
    with _engine():
        from fedmerit.simulation.plan import STEPS
        from fedmerit.simulation.plan import plan as make_plan
    with _settings_of(config, set_ or ()), counting(err, "measure", STEPS) as done:
        planned = make_plan(settings, done=done)
    if format == "json":
        write_json(planned.as_dict())
        return
    print_plan(out, planned)
    tell_notes(out, planned.notes)


def _run(config: Config, folder: Path, *, resume: bool, repeats: Path | None = None) -> None:
    """Run a federation, or go on with it, and print its scores; ``repeats`` is the run that it repeats."""
    from fedmerit.report.facts import Facts
    from fedmerit.report.page.html import page_of_run
    from fedmerit.report.source import read_source
    from fedmerit.report.terminal import print_facts, print_truth, tell_planted, watching
    from fedmerit.storage.run_folder import stored_pool_key, timed

    with _engine():
        from fedmerit.simulation.run import run as run_embedded
        from fedmerit.simulation.training import keep_memory
    keep_memory()
    key = None if repeats is None else stored_pool_key(repeats)
    with watching(err) as watch:
        run_embedded(config, folder, resume=resume, watch=timed(watch, folder), pool_key=key)
    facts = Facts(read_source(folder))
    tell_planted(out, facts.source)
    print_facts(out, facts)
    if facts.source.analysed:
        print_truth(out, facts)
    out.print(f"written to {folder}: scores.json, scores.csv, ledger.sqlite")
    out.print(page_of_run(folder))


@contextmanager
def _stoppable(folder: Path, on: str = "go on with --resume") -> Iterator[None]:
    """Say after Ctrl-C how far the run got and how it goes ``on``; the exit code is then 130."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(_stopped(folder, on))
        raise typer.Exit(130) from None


def _stopped(folder: Path, on: str) -> str:
    """Return how far a run got that was stopped, and what to do next."""
    kinds = _kinds(folder)
    if not kinds or not (folder / "config.toml").exists():
        return "stopped before the run began; start it again"
    planned, closed = of_folder(folder).training.rounds, kinds.count("round")
    if "end" in kinds:
        return f"stopped when all {planned} rounds were over; see fedmerit score {folder}"
    if not closed:
        return f"stopped before the end of round 1 of {planned}; {on}"
    return f"stopped after round {closed} of {planned}; {on}"


def _kinds(folder: Path) -> list[str]:
    """Return the kinds of a ledger's records in their order; nothing if there is no ledger."""
    from fedmerit.ledger.chain import Ledger

    if not (folder / LEDGER).exists():
        return []
    with Ledger(folder / LEDGER, read_only=True) as ledger:
        return [record.kind for record in ledger.records()]


@contextmanager
def _settings_of(file: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Put the file's name in front of errors about a setting, unless --set gave that setting."""
    asked = asked_for(overrides)
    try:
        yield
    except (ConfigError, DataError) as error:
        if not error.setting or error.setting in asked:
            raise
        raise type(error)(f"{file}: {error}", setting=error.setting) from error


@contextmanager
def _engine() -> Iterator[None]:
    """Say what to install if an import of the engine inside fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise MissingExtra.of("running a federation needs", "engine") from error


# --------------------------------------------- the demo's settings, and a config file that explains itself

DEMO: dict[str, Any] = {
    "partition": {"scheme": "iid", "names": ["Abbey", "Bridge", "Castle", "Dale", "Elm", "Harbour"]},
    "corruption": {"label_noise": {"Harbour": 0.8}},
    "model": {"name": "mlp"},
    "training": {"rounds": 6, "local_epochs": 3},
    "scoring": {"method": "settled", "utilities": ["expected-accuracy"]},
}
"""Six hospitals, one of which has mostly noise for labels."""
DEMO_BUDGET = "10000.00"
PANEL: dict[str, Any] = {"scoring": DEMO["scoring"] | {"method": "panel"}}
"""What is different when they judge each other."""
FALSE_JUDGE: dict[str, Any] = {"corruption": DEMO["corruption"] | {"judge": {"Elm": "praise:Dale"}}}
"""What is different when one of them judges falsely for a friend."""
LIAR: dict[str, Any] = {
    "corruption": {"misstate": {"Elm": 1.01}},
    "training": {"rounds": 1, "local_epochs": 1},
}
"""What is different when one of them lies: a short run is enough."""


def is_demo(folder: Path) -> bool:
    """Return whether a folder holds a run of the demo's hospitals."""
    try:
        found = of_folder(folder)
    except ConfigError:
        return False
    return found.clients == tuple(DEMO["partition"]["names"])


FIRST: dict[str, Any] = {
    "partition": {"scheme": "iid"},
    "corruption": {"label_flip": ["client-5"]},
    "model": {"name": "mlp"},
    "training": {"rounds": 5, "local_epochs": 3},
}
"""What differs from the defaults in a first run: it takes a minute, and finds a fault that is planted."""
HEADER = """\
# fedmerit: settings of a run. As they are, six members train on fashion-mini, which is shipped; the labels of
# client-5 are turned upside down on purpose, and the run finds that. It takes about a minute:
#     fedmerit run THIS.toml --out runs/first
# For your own data, change [data] and [partition], and write label_flip = [] in [corruption]; see
# docs/bring-your-own.md. Delete what you do not change: every key has a default, which is the value here
# unless its line names another one.
"""


def commented_config() -> str:
    """Return every setting of a first run, explained by the words beside it in `fedmerit.config`."""
    from fedmerit.config import from_dict

    default, first = Config().as_dict(), from_dict(FIRST)
    lines = [HEADER, f"schema = {SCHEMA}"]
    for section, values in first.as_dict().items():
        kind = type(getattr(first, section))
        lines += ["", f"# {(kind.__doc__ or '').strip()}", f"[{section}]"]
        for key, value in values.items():
            above, beside = _explained(kind, key)
            if value != (usual := default[section][key]):
                beside = "; ".join(filter(None, (f"default {written(usual)}", beside)))
            lines += [f"# {line}" for line in textwrap.wrap(above, 108)]
            lines.append(f"{key} = {written(value)}" + (f"  # {beside}" if beside else ""))
    return "\n".join(lines) + "\n"


def _explained(kind: type[Any], key: str) -> tuple[str, str]:
    """Return the words above and beside a setting; those beside it begin with its choices, if any."""
    found = kind.__dataclass_fields__.get(key)
    if found is None:
        return "", ""
    hint = get_type_hints(kind)[key]
    choices = ", ".join(map(written, filter(None, get_args(hint)))) if get_origin(hint) is Literal else ""
    words = [choices and f"one of {choices}", found.metadata.get("beside", "")]
    return found.metadata.get("above", ""), "; ".join(filter(None, words))


def paper_config(name: PaperData) -> str:
    """Return the protocol of the paper's main table on one of its datasets, as a commented config."""
    known = tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))
    return str(known["protocol"].format(**known["data"][name]))


# ---------------------------------------------------------------------------------------------- the ledger

PART = 3
"""Exit code if all that is there verifies, but it is only a part of the ledger of a run."""


@app.command()
def verify(
    source: Annotated[Path, Argument(metavar="SOURCE")],
    head: Annotated[
        str | None, Option(help="A head of the ledger that you stored: it must still be on the chain.")
    ] = None,
    heads: Annotated[
        Path | None, Option(help="A member's own file of heads and reports: KEY.pem.state/RUN/heads.")
    ] = None,
    as_: Annotated[
        str | None, Option("--as", help="Your own name: your part is shown too.", metavar="NAME")
    ] = None,
    roster: Annotated[
        Path | None, Option(help="Your roster file: the keys in the ledger must match it.")
    ] = None,
    archive: Annotated[
        Path | None,
        Option(help="The archive of a settled run (DIR/archive): recompute sums, products, verdicts."),
    ] = None,
    format: base.PlainFormat = "table",
) -> None:
    """Check a run's ledger: chain, signatures, heads, and that scores and payouts follow from the reports.

    SOURCE is a run folder, or an exported ledger (.jsonl). The exit code is 3 if an exported ledger lacks the
    end of the run.
    """
    from fedmerit.verify import is_copy, verify_copy, verify_folder

    copy = is_copy(source)
    if source.is_file() and not copy:
        inside = f": give its folder, {source.parent}" if source.name == LEDGER else ""
        fail(f"{source}: expected a run folder or an exported ledger (.jsonl){inside}")
    check = verify_copy if copy else verify_folder
    lines: list[Note] = []
    wrong: FedmeritError | None = None
    try:
        for line in check(source, head=head, heads=heads, member=as_, roster=roster, archive=archive):
            lines.append(line)
            if format == "table":
                out.print(line)
    except FedmeritError as error:
        wrong = error
    part = any(line.code == "part" for line in lines)
    if format == "json":
        error_ = wrong and {"record": getattr(wrong, "record", None), "text": str(wrong)}
        found = [{"code": line.code, "text": str(line)} for line in lines]
        outcome = {"source": str(source), "verified": wrong is None, "part": part}
        write_json({**outcome, "lines": found, "error": error_})
    if wrong is not None:
        raise wrong
    if part:
        raise typer.Exit(PART)


@app.command()
def export(
    folder: Annotated[Path, Argument(metavar="DIR")],
    out_: Annotated[Path, Option("--out", help="Where to write it; a name that ends in .jsonl.")],
    for_: Annotated[
        str | None, Option("--for", help="Make the copy for this member: it holds what that member may see.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite any file that is there.")] = False,
) -> None:
    """Write the ledger of the run folder DIR as lines of JSON, to keep, to hand out, and to verify again.

    An existing copy is overwritten only by a longer one that begins with it, or with --force.
    """
    from fedmerit.ledger.chain import Ledger, exported
    from fedmerit.ledger.rounds import sees
    from fedmerit.ledger.run import opening_of
    from fedmerit.storage.run_folder import write

    if out_.suffix != ".jsonl":
        fail(f"{out_}: expected a name that ends in .jsonl")
    if not out_.parent.is_dir():
        fail(f"{out_}: could not be written: there is no folder {out_.parent}")
    with Ledger(folder / LEDGER, read_only=True) as ledger:
        _, config = opening_of(ledger)
        if for_ is not None and for_ not in config.clients:
            fail(f"{for_!r} is not a member of the run; members are {', '.join(config.clients)}")
        private = for_ is not None and config.scoring.visibility == "coordinator"
        visible = sees(for_) if private and for_ is not None else lambda _: True
        lines = list(exported(ledger, visible))
    data = b"".join(lines)
    if out_.exists() and not force and not data.startswith(out_.read_bytes()):
        fail(f"{out_}: exists, and this ledger does not begin with it: choose another --out, or use --force")
    write(out_, data, mode=0o600 if config.scoring.visibility == "coordinator" else 0o644)
    held = sum(b'"withheld":' in line for line in lines)
    out.print(f"wrote {out_}: {len(lines)} records" + (f", {held} of them withheld" if private else ""))
    if for_ is not None and not private:
        out.print("every member of this run may see every record, so nothing is withheld")
