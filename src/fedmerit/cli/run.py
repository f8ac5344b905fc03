"""Commands on runs: run, demo, init, plan, track, page; and on their ledgers: verify, export."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from fedmerit.cli.base import (
    Consortium_,
    Currency_,
    Date_,
    Decimal_,
    Delimiter_,
    Distinct_,
    Encoding_,
    Force_,
    Language_,
    PlainFormat,
    PlainFormat_,
    Set_,
    Title_,
    app,
    err,
    fail,
    form_of,
    heading_of,
    out,
    write,
)
from fedmerit.cli.score import tell_read
from fedmerit.config import SCHEMA, Config, asked_for, of_folder
from fedmerit.errors import ConfigError, FedmeritError
from fedmerit.notes import Note, words
from fedmerit.scoring.files import LEDGER
from fedmerit.toml_values import written

# ------------------------------------------------------------------------------------------------ the page


class Figures(StrEnum):
    """File formats of figures."""

    png = "png"
    pdf = "pdf"
    svg = "svg"


@app.command()
def page(
    source: Annotated[
        Path, typer.Argument(help="A run folder, or a file of reports (.json or .csv).", metavar="SOURCE")
    ],
    out_: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Where to write it.",
            show_default="DIR/page-TITLE-DIR.html, or FILE.html for FILE.csv",
        ),
    ] = None,
    pseudonyms: Annotated[
        bool, typer.Option("--pseudonyms", help="Show members as Member A, Member B, ...")
    ] = False,
    figures: Annotated[
        list[Figures] | None,
        typer.Option("--figures", help="Also write the charts as files beside it; repeatable."),
    ] = None,
    title: Title_ = None,
    consortium: Consortium_ = None,
    date: Date_ = None,
    currency: Currency_ = None,
    language: Language_ = None,
    force: Force_ = False,
    delimiter: Delimiter_ = None,
    decimal: Decimal_ = None,
    encoding: Encoding_ = None,
    distinct: Distinct_ = None,
) -> None:
    """Write one HTML page that anybody can open: who contributed what, how sure that is, who is paid what.

    SOURCE is a run folder, or a file of reports (.json or .csv).
    """
    from fedmerit.notes import speaking
    from fedmerit.report.page.html import (
        check_target,
        facts_of,
        for_coordinator,
        language_of,
        page_path,
        render,
    )
    from fedmerit.report.page.html import figures as make_figures
    from fedmerit.report.terminal import counting
    from fedmerit.report.text import printable
    from fedmerit.storage.run_folder import write

    heading, form = (
        heading_of(title, consortium, date, currency),
        form_of(delimiter, decimal, encoding, distinct),
    )
    target = out_ or (source if source.is_dir() else source.with_suffix(".html"))
    if out_ is not None or not source.is_dir():
        check_target(target, force=force)
    with speaking(language.value if language else language_of(source)), counting(err, "page", 2) as done:
        facts = facts_of(source, pseudonyms=pseudonyms, form=form, heading=heading)
        done()
        if out_ is None and facts.source.book is not None and _renewed(source):
            facts = facts_of(source, pseudonyms=pseudonyms, heading=heading)
        if out_ is None and source.is_dir():
            target = page_path(source, facts.source.heading)
            check_target(target, force=force)
        write(target, render(facts).encode())
        done()
    out.print(f"wrote {target}")
    tell_read(facts.source, out)
    for doubt in facts.doubts:
        out.print(f"WARNING: {printable(str(doubt))}")
    if facts.source.broken:
        out.print(f"WARNING: the ledger does not verify: {facts.source.broken}")
    if facts.source.private:
        out.print(for_coordinator(target))
    for kind in dict.fromkeys(figures or ()):
        names = []
        for name, made in make_figures(facts, kind.value):
            names.append(f"{target.stem}-{name}")
            write(target.with_name(names[-1]), made)
        out.print(f"wrote {len(names)} figures beside it: {names[0]} to {names[-1]}")


def _renewed(folder: Path) -> bool:
    """Rewrite score files that are older than the ledger; return whether any were, and print any refusal."""
    from fedmerit.errors import StoreError
    from fedmerit.verify import renew

    try:
        done = renew(folder)
    except StoreError as error:
        out.print(f"score files were left as they are: {error}")
        return False
    if done:
        out.print(done)
    return bool(done)


def write_page(folder: Path) -> None:
    """Write the page of a finished run and print where it is, or how to get one."""
    from fedmerit.report.page.html import page_of_run

    out.print(page_of_run(folder))


# ----------------------------------------------------------------------------- a federation in one process


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Settings (TOML); an empty file takes all defaults.")],
    out_: Annotated[Path, typer.Option("--out", help="The run folder.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that folder.")] = False,
    set_: Set_ = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Send curves to tensorboard:DIR or mlflow:URI; repeatable.")
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Train so many times, in DIR/run-1, DIR/run-2, ...: the same data and test pool, but other "
            "first models and batch orders; then compare the runs.",
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
                _run(settings, out_, resume=resume, track=track or ())
        elif track:
            fail(
                "--track: expected without --repeat; `fedmerit track` sends the curves of each run afterwards"
            )
        else:
            _repeat(settings, out_, repeat, resume=resume)


def _repeat(config: Config, folder: Path, count: int, *, resume: bool) -> None:
    """Train several times on the same data, each time in a folder of its own, and compare the runs."""
    from fedmerit.cli.compare import write_comparison
    from fedmerit.report.comparison import compared
    from fedmerit.report.page.html import installed
    from fedmerit.report.terminal import print_comparison
    from fedmerit.storage.repeat_folders import PAGE, repeats_in

    if config.run.repeat != 1:
        raise ConfigError.at("run.repeat", f"expected 1 with --repeat, got {config.run.repeat}")
    planned = repeats_in(folder, config, count, resume=resume)
    for one in planned:
        out.print(f"run {one.number} of {count}: {one.folder}")
        first = planned[0].folder if one.number > 1 else None
        with _stoppable(one.folder):
            _run(one.config, one.folder, resume=one.begun, repeats=first)
    found = compared([one.folder for one in planned])
    print_comparison(out, found)
    if installed():
        write_comparison(found, folder / PAGE)
        out.print(words("file.comparison", path=folder / PAGE))
    else:
        out.print(words("file.install-comparison", folder=folder, path=folder / PAGE))


@app.command()
def demo(
    out_: Annotated[Path, typer.Option("--out", help="The run folder.")] = Path("runs/demo"),
    set_: Set_ = None,
) -> None:
    """Let six hospitals train together on fashion-mini; one has noisy labels. Then one lies about its score.

    Takes about a minute.
    """
    from fedmerit.config import from_dict
    from fedmerit.storage.run_folder import remove
    from fedmerit.verify import verify_folder

    settings, liar = from_dict(DEMO, set_ or ()), Path(f"{out_}-liar")
    for folder in (out_, liar):
        if is_demo(folder):  # the demo starts afresh each time, and removes only runs of its hospitals
            remove(folder)
    out.print("Six hospitals, secure aggregation on. 80% of Harbour's labels are random.")
    with _stoppable(out_, on="fedmerit demo starts afresh"):
        _run(settings, out_, resume=False)
        for line in verify_folder(out_):
            out.print(line)
        if settings.settles:
            _demo_liar(from_dict(DEMO | LIAR, set_ or ()), liar)
    out.print(f"next: fedmerit rewards {out_} --budget 10000.00")


def _demo_liar(config: Config, folder: Path) -> None:
    """Run the hospitals once more, with one that lies about its score; say what the settlement shows."""
    from fedmerit.storage.archive import ARCHIVE
    from fedmerit.verify import verify_folder

    with _engine():
        from fedmerit.simulation.run import run as run_embedded
    run_embedded(config, folder)
    out.print(f"The same hospitals once more ({folder}): Elm states 1% more than its score.")
    for line in verify_folder(folder, archive=folder / ARCHIVE):
        if line.code.startswith("settlement"):
            out.print(line)
    write_page(folder)


class PaperData(StrEnum):
    """Datasets of the paper, and one that is shipped and small."""

    fashion_mini = "fashion-mini"
    cifar10 = "cifar10"
    brain_mri = "brain-mri"
    isic2019 = "isic2019"
    pcam = "pcam"


@app.command()
def init(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="Where to write it.",
            show_default="fedmerit.toml, reports.csv with --csv, or paper.toml with --paper",
        ),
    ] = None,
    paper: Annotated[
        PaperData | None,
        typer.Option(
            help="Write the paper's protocol on this dataset, not every setting.", show_default=False
        ),
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="Write a table of reports to fill in, not a config.")
    ] = False,
    member: Annotated[
        list[str] | None,
        typer.Option(help="With --csv: the name of a member; repeatable.", show_default="Member 1 to 3"),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="With --csv: how many rounds.", show_default="3")] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            help="With --csv: what separates cells, comma, semicolon, tab or bar.", show_default="comma"
        ),
    ] = None,
) -> None:
    """Write a commented config with every setting and its default; or the paper's protocol; or a table.

    PATH is the file to write. With --paper it is a short config, whose run prints the paper's table of LOO,
    FP, EE and COS. With --csv it is a table of reports to fill in. The table has one line per round
    and member; spreadsheet programs in most of Europe open it with --delimiter semicolon. A file that exists
    is never overwritten.
    """
    from fedmerit.scoring.tidy import template

    if csv and paper:
        fail("--paper: expected without --csv")
    if csv:
        path = path or Path("reports.csv")
        if path.suffix.lower() != ".csv":
            fail(f"{path}: expected a name that ends in .csv")
        names = member or [f"Member {k}" for k in range(1, 4)]
        count = 3 if rounds is None else rounds
        text = template(names, count, form_of(delimiter, None, None).delimiter or ",")
        _write_new(path, "\ufeff" + text)  # the mark tells spreadsheet programs that this is UTF-8
        out.print(f"wrote {path}: fill in {count * len(names)} lines; next: fedmerit score {path}")
        return
    for name, given in (("--member", member), ("--rounds", rounds), ("--delimiter", delimiter)):
        if given is not None:
            fail(f"{name}: expected together with --csv; a config has its own settings")
    path = path or Path("paper.toml" if paper else "fedmerit.toml")
    _write_new(path, paper_config(paper) if paper else commented_config())
    out.print(f"wrote {path}; next: fedmerit run {path} --out runs/{'paper' if paper else 'first'}")
    if paper:
        return
    out.print("your own data, model and metric: docs/bring-your-own.md and examples/bring-your-own")


def _write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        fail(f"{path}: exists already and is not overwritten")
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}")


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="Settings (TOML).")],
    set_: Set_ = None,
    format: PlainFormat_ = PlainFormat.table,
) -> None:
    """Show what a run will cost here (models, trainings, minutes, memory, bytes) and what it can resolve.

    CONFIG is a file of settings (TOML), as for `fedmerit run`.
    """
    from fedmerit.config import load
    from fedmerit.report.terminal import counting, print_plan
    from fedmerit.report.text import printable

    settings = load(config, set_ or ())
    with _engine():
        from fedmerit.simulation.plan import STEPS
        from fedmerit.simulation.plan import plan as make_plan
    with _settings_of(config, set_ or ()), counting(err, "measure", STEPS) as done:
        planned = make_plan(settings, done=done)
    if format is PlainFormat.json:
        write(json.dumps(planned.as_dict(), indent=1, ensure_ascii=False) + "\n")
        return
    print_plan(out, planned)
    for note in planned.notes:
        out.print(f"note: {printable(note)}")


@app.command()
def track(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that is over.", metavar="DIR")],
    to: Annotated[str, typer.Option(help="tensorboard:DIR or mlflow:URI.")],
) -> None:
    """Send the scores of a run to TensorBoard or MLflow, as curves.

    DIR is the folder of a run that is over. During a run, `fedmerit run --track` does the same.
    """
    from fedmerit.report.exports import replay, tracker

    rounds = replay(folder, tracker(to))
    out.print(f"sent {rounds} round{'' if rounds == 1 else 's'} to {to}")


def _run(
    config: Config, folder: Path, *, resume: bool, track: Sequence[str] = (), repeats: Path | None = None
) -> None:
    """Run a federation, or go on with it, and print its scores; ``repeats`` is the run that it repeats."""
    from fedmerit.report.exports import tracked, tracker
    from fedmerit.report.facts import Facts
    from fedmerit.report.source import source_of, timed
    from fedmerit.report.terminal import print_facts, print_truth, watching
    from fedmerit.report.text import printable
    from fedmerit.storage.run_folder import recorded

    trackers = [tracker(where) for where in track]
    with _engine():
        from fedmerit.simulation.run import pool_key_in
        from fedmerit.simulation.run import run as run_embedded
        from fedmerit.simulation.training import keep_memory
    keep_memory()
    key = None if repeats is None else pool_key_in(repeats)
    with watching(err) as watch, tracked(timed(watch, folder), folder, config, trackers) as watched:
        written = run_embedded(config, folder, resume=resume, watch=watched, pool_key=key)
    found = recorded(folder)
    source = source_of(found.content, found, missing=config.payment.missing)
    if source.planted:
        out.print(printable(source.planted))
    print_facts(out, Facts(source))
    if config.analysis:
        print_truth(out, written, source.rounds)
    out.print(f"written to {folder}: scores.json, scores.csv, ledger.sqlite")
    write_page(folder)


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
    from fedmerit.ledger.chain import Ledger
    from fedmerit.ledger.records import rounds_of

    if not (folder / "config.toml").exists() or not (folder / LEDGER).exists():
        return "stopped before the run began; start it again"
    planned, closed, over = of_folder(folder).training.rounds, 0, False
    with Ledger(folder / LEDGER, read_only=True) as ledger:
        if len(ledger):
            closed, over = len(rounds_of(ledger)), any(ledger.records("end"))
    if over:
        return f"stopped when all {planned} rounds were over; see fedmerit score {folder}"
    if not closed:
        return f"stopped before the end of round 1 of {planned}; {on}"
    return f"stopped after round {closed} of {planned}; {on}"


@contextmanager
def _settings_of(file: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Put the file's name in front of errors about a setting, unless --set gave that setting."""
    from fedmerit.errors import ConfigError, DataError

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
    from fedmerit.errors import MissingExtra

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise MissingExtra("running a federation needs: pip install 'fedmerit[engine]'") from error


# --------------------------------------------- the demo's settings, and a config file that explains itself

DEMO: dict[str, Any] = {
    "partition": {
        "scheme": "iid",
        "names": ["Abbey", "Bridge", "Castle", "Dale", "Elm", "Harbour"],
    },
    "corruption": {"label_noise": {"Harbour": 0.8}},
    "model": {"name": "mlp"},
    "training": {"rounds": 6, "local_epochs": 3},
    "scoring": {"method": "settled"},
    "report": {"consortium": "Six hospitals"},
}
"""Six hospitals, one of which has mostly noise for labels."""
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


def commented_config() -> str:
    """Return every setting with its default, explained by the words beside it in `fedmerit.config`."""
    default = Config()
    lines = [
        "# fedmerit: settings of a run. Every key has this default; delete what you do not change.",
        "# fedmerit run THIS.toml --out runs/first",
        "",
        f"schema = {SCHEMA}",
    ]
    for section, values in default.as_dict().items():
        kind = type(getattr(default, section))
        lines += ["", f"# {(kind.__doc__ or '').strip()}", f"[{section}]"]
        for key, value in values.items():
            above, beside = _explained(kind, key)
            lines += [f"# {above}"] if above else []
            lines.append(f"{key} = {written(value)}" + (f"  # {beside}" if beside else ""))
    return "\n".join(lines) + "\n"


def _explained(kind: type[Any], key: str) -> tuple[str, str]:
    """Return the words above and beside a setting; those beside it begin with its choices, if any."""
    found = kind.__dataclass_fields__.get(key)
    if found is None:
        return "", ""
    hint = get_type_hints(kind)[key]
    choices = " | ".join(get_args(hint)) if get_origin(hint) is Literal else ""
    words = [choices, found.metadata.get("beside", "")]
    return found.metadata.get("above", ""), "; ".join(word for word in words if word)


class _Setup(NamedTuple):
    """What differs from one dataset of the paper to the next."""

    about: str
    data: str
    model: str
    epochs: int
    batch: int


_GROUPS = "  # from scratch, with GroupNorm; the scripts: pretrained, with BatchNorm"
_SETUPS = {
    PaperData.fashion_mini: _Setup(
        "fashion-mini, which is shipped and not in the paper: one to two minutes on two CPU cores",
        "test_size = 500",
        '"mlp"  # "cnn" as for CIFAR-10 takes many times as long',
        5,
        64,
    ),
    PaperData.cifar10: _Setup(
        "CIFAR-10",
        'path = "data/cifar-10-python.tar.gz"  # https://www.cs.toronto.edu/~kriz/cifar.html\n'
        "test_size = 2000",
        '"cnn"',
        5,
        64,
    ),
    PaperData.brain_mri: _Setup(
        "Brain-MRI",
        'path = "data/brain-mri"  # holds Training and Testing: '
        "https://www.kaggle.com/datasets/masoudnickparvar/brain-tumor-mri-dataset\n"
        "options = {size = 224}  # as the paper's Linear(100352, 128) needs; grey here, colour there\n"
        "test_size = 800",
        '"cnn-pool"',
        5,
        64,
    ),
    PaperData.isic2019: _Setup(
        "ISIC 2019",
        'path = "data/isic2019"  # images, ground truth and metadata: '
        "https://challenge.isic-archive.com/data/#2019\n"
        "options = {size = 64}  # pixels a side\n"
        "test_size = 0  # as the test images are; a number balances the classes, as the paper does",
        '"resnet50"' + _GROUPS,
        3,
        32,
    ),
    PaperData.pcam: _Setup(
        "PCam",
        'path = "data/pcam"  # the unpacked .h5 files: https://github.com/basveeling/pcam\n'
        "options = {limit = 20000}  # of 262,144 training images, which need 7.2 GB\n"
        "test_size = 2000",
        '"resnet18"' + _GROUPS,
        5,
        32,
    ),
}


def paper_config(name: PaperData) -> str:
    """Return the protocol of the paper's main table on one of its datasets, as a commented config."""
    one = _SETUPS[name]
    return f"""\
# The protocol of "Beyond Leave-One-Out" (its main table: 9 clients, Dirichlet 0.5, 10th round) on
# {one.about}.
# `fedmerit run THIS.toml --out runs/paper` ends with the table of LOO, FP, EE and COS, twice:
# as the authors' scripts compute it, with v(empty) = 0; and as the text defines it, with v(empty) = v(M0).
# The paper runs it ten times: add --set run.seed=1 to --set run.seed=9, each with an --out of its own.
# `fedmerit plan THIS.toml` says how long that takes here.

[data]
name = "{name.value}"
{one.data}

[partition]
clients = 9
scheme = "dirichlet"
mu = 0.5

[model]
name = {one.model}

[training]
rounds = 10  # the last one is scored
local_epochs = {one.epochs}
batch_size = {one.batch}
optimiser = "adam"
lr = 0.001
weight_decay = 0.001
weights = "uniform"  # U_i = (M_i - M0)/N; the scripts weigh by samples: "secret"

[scoring]
method = "reports"  # client i reports v(M0 + U_i) and v(M - U_i)
utilities = ["accuracy", "expected-accuracy"]  # the table is that of the first
game = "additive"  # M0 plus the updates of a coalition, as in the text; the scripts: "renormalised"
# the truth of the scripts, and that of the text; both need plain updates, so the run is marked as an analysis
truth = ["round-shapley", "mr-shapley"]
"""


# ---------------------------------------------------------------------------------------------- the ledger

PART = 3
"""Exit code if all that is there verifies, but it is only a part of the ledger of a run."""


@app.command()
def verify(
    source: Annotated[
        Path, typer.Argument(help="A run folder, or an exported ledger (.jsonl).", metavar="SOURCE")
    ],
    head: Annotated[
        str | None, typer.Option(help="A head of the ledger that you stored: it must still be on the chain.")
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(help="A member's own file of heads and reports: KEY.pem.state/RUN/heads."),
    ] = None,
    as_: Annotated[
        str | None, typer.Option("--as", help="Your own name: your part is shown too.", metavar="NAME")
    ] = None,
    roster: Annotated[
        Path | None,
        typer.Option(help="Your roster file: the keys in the ledger must match it."),
    ] = None,
    after: Annotated[
        list[Path] | None,
        typer.Option(help="An earlier run, folder or copy, on which a decision also rests; repeatable."),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(help="The archive of a settled run (DIR/archive): recompute sums, products, verdicts."),
    ] = None,
    format: PlainFormat_ = PlainFormat.table,
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
    given: dict[str, Any] = {
        "head": head,
        "heads": heads,
        "member": as_,
        "roster": roster,
        "archive": archive,
    }
    lines: list[Note] = []
    wrong: FedmeritError | None = None
    try:
        for line in check(source, **given, after=after or ()):
            lines.append(line)
            if format is PlainFormat.table:
                out.print(line)
    except FedmeritError as error:
        wrong = error
    part = any(line.code == "part" for line in lines)
    if format is PlainFormat.json:
        told = wrong and {"record": getattr(wrong, "record", None), "text": str(wrong)}
        said = [{"code": line.code, "text": str(line)} for line in lines]
        found = {"source": str(source), "verified": wrong is None, "part": part, "lines": said, "error": told}
        write(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if wrong is not None:
        raise wrong
    if part:
        raise typer.Exit(PART)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")],
    out_: Annotated[Path, typer.Option("--out", help="Where to write it; a name that ends in .jsonl.")],
    for_: Annotated[
        str | None,
        typer.Option("--for", help="Make the copy for this member: it holds what that member may see."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite any file that is there.")] = False,
) -> None:
    """Write the ledger of the run folder DIR as lines of JSON, to keep, to hand out, and to verify again.

    An existing copy is overwritten only by a longer one that begins with it, or with --force.
    """
    from fedmerit.ledger.chain import Ledger, exported
    from fedmerit.ledger.records import config_of, sees
    from fedmerit.storage.run_folder import write

    if out_.suffix != ".jsonl":
        fail(f"{out_}: expected a name that ends in .jsonl")
    if not out_.parent.is_dir():
        fail(f"{out_}: could not be written: there is no folder {out_.parent}")
    with Ledger(folder / LEDGER, read_only=True) as ledger:
        config = config_of(ledger)
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
