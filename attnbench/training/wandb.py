"""Mirror in wandb of results on disk: a training's metrics, a comparison's tables and charts.

wandb is imported here alone, and only by a mirror whose mode is not `none`.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attnbench.machine.environment import answers, has_netrc_key
from attnbench.settings.errors import UserError
from attnbench.settings.schema import LoggerSettings

PROBE_SECONDS = 1.5
"""Longest wait for any answer of wandb's server before a run is logged offline."""
INIT_SECONDS = 15.0
"""Longest wait for a server that answers to take the run in."""
FINISH_SECONDS = 20.0
"""Longest wait at the end of a run for what is not uploaded yet; `wandb sync` uploads the rest."""
REACHABLE = "logged in, and the server can be reached"
"""Why mode auto is online."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Numbers along an axis."""

    title: str
    axis: str
    """Its name."""
    lines: dict[str, list[tuple[float, float]]]
    """By name: (position on the axis, value)."""


LINE_CHART = "wandb/lineseries/v0"
"""Name of wandb's chart of several lines."""

LINE_CHART_FIELDS = {"step": "step", "lineKey": "lineKey", "lineVal": "lineVal"}
"""Its position, name and value, and the columns of its table that hold them."""


class WandbMirror:
    """Mirror of a MetricsLog in wandb, online or offline; mode `none` does nothing and imports nothing.

    Nothing here waits for the network for longer than PROBE_SECONDS + INIT_SECONDS at the start and FINISH_SECONDS at
    the end. In between wandb's own process uploads what it can: a network lost in the middle costs the run nothing, and
    what did not get through is on disk under root/wandb, for `wandb sync`. No code, git state, console output or
    system statistics are kept; the config is what is given and nothing from the environment.

    A row's `split` becomes the prefix of its numbers (train/loss), and `tokens` is the horizontal axis.

    Args:
        root: the folder that gets the one folder wandb/.
        run_id: a readable name of the run.
        folder: the folder that the run mirrors, which alone tells it from every other run: an offline copy of the same
            folder that was not uploaded is replaced.
        resume: the run goes on from a checkpoint; `replay` then gives the rows that came before.

    Attributes:
        mode: online, offline or none, as decided.
        reason: why, in a few words.
        notice: one line for the caller to print.

    Raises:
        UserError: mode online where nobody is logged in or the server does not answer, an illegal project name, or a
            `root` that cannot be written to.
    """

    def __init__(
        self,
        settings: LoggerSettings,
        *,
        root: Path,
        run_id: str,
        folder: Path,
        name: str,
        group: str,
        job_type: str,
        config: dict[str, Any],
        resume: bool,
        tags: Sequence[str] = (),
    ) -> None:
        self._run: Any = None
        self._first_step = 0
        self.mode, self.reason = choose_mode(settings)
        self.notice = f"wandb: off ({self.reason})"
        if self.mode == "none":
            return
        if re.search(r"[/\\#?%:]", settings.project):
            raise UserError(f"logger.project={settings.project}: wandb allows none of / \\ # ? % :")
        arguments = {
            "entity": settings.entity,
            "project": settings.project,
            "dir": str(root.resolve()),
            "id": legal_run_id(run_id, folder),
            "name": (settings.name or name)[:128],
            "group": group[:128],
            "job_type": job_type[:64],
            "tags": [tag[:64] for tag in dict.fromkeys([*tags, *settings.tags]) if tag],
            "config": config,
        }
        self._open(arguments, root, must_be_online=self.reason != REACHABLE, resume=resume)

    def _open(self, arguments: dict[str, Any], root: Path, *, must_be_online: bool, resume: bool) -> None:
        _prepare_folder(root / "wandb")
        # Tables wait there for `wandb sync`; otherwise in the user's home, where they would be missed.
        os.environ.setdefault("WANDB_DATA_DIR", arguments["dir"] + "/wandb")
        stale = [file.parent for file in (root / "wandb").glob(f"offline-run-*/run-{arguments['id']}.wandb")]
        if self.mode == "online":
            try:
                self._run = _init(arguments, mode="online", resume="allow" if resume else None)
            except wandb_errors() as error:
                # Its first line says what happened, the rest how to call wandb otherwise.
                answer = str(error).splitlines()[0]
                if must_be_online:
                    raise UserError(f"{self.reason}: wandb's server did not take the run in: {answer}") from error
                self.mode, self.reason = "offline", f"the server did not take the run in: {answer}"
                # wandb's process holds on to the id of a run that it could not start.
                _quiet_wandb().teardown()
        if self._run is None:
            self._run = _init(arguments, mode="offline", resume=None)
        self._first_step = self._run.starting_step
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")
        for folder in stale:
            # One that was uploaded stays: `wandb sync` passes it over.
            if not any(folder.glob("*.synced")):
                shutil.rmtree(folder)
        if self.mode == "online":
            self.notice = f"wandb: online at {self._run.url}"
        else:
            folder = os.path.relpath(self._run.settings.sync_dir)
            self.notice = f"wandb: offline ({self.reason}); view with `wandb leet`, upload with `wandb sync`: {folder}"

    def replay(self, rows: Iterable[dict[str, Any]]) -> None:
        """Give a resumed run the rows that metrics.jsonl kept.

        A server that has them already gets none twice; an offline copy starts with them, so that it is whole.
        """
        for row in rows:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        """Show one row of metrics.jsonl; steps never go back."""
        if self._run is None or row["step"] < self._first_step:
            return
        prefix = f"{row['split']}/" if row.get("split") else ""
        shown = {name: value for name, value in row.items() if name != "split" and value is not None}
        axes = ("step", "tokens")
        content = {name if name in axes else prefix + name: value for name, value in shown.items()}
        self._send(lambda: self._run.log(content, step=row["step"]))

    def show(
        self,
        *,
        tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]],
        charts: Mapping[str, LineChart],
        summary: Mapping[str, float],
    ) -> None:
        """Show tables, charts and a summary, which have no steps, under these names.

        Args:
            tables: columns, and rows of numbers, text and None.
            summary: the numbers of the run as a whole.
        """
        if self._run is None:
            return
        wandb = _quiet_wandb()
        content = {name: wandb.Table(columns=list(columns), data=rows) for name, (columns, rows) in tables.items()}
        for name, chart in charts.items():
            points = [[x, line, value] for line, line_points in chart.lines.items() for x, value in line_points]
            content[name] = wandb.plot_table(
                LINE_CHART,
                wandb.Table(columns=list(LINE_CHART_FIELDS.values()), data=points),
                LINE_CHART_FIELDS,
                {"title": chart.title, "xname": chart.axis},
            )
        self._send(lambda: (self._run.log(content), self._run.summary.update(dict(summary))))

    def close(self, exit_code: int = 0) -> None:
        """End the run in wandb, as failed where `exit_code` is not 0; called a second time it does nothing."""
        run, self._run = self._run, None
        if run is not None:
            self._send(lambda: run.finish(exit_code=exit_code))

    def _send(self, act: Callable[[], object]) -> None:
        try:
            act()
        except wandb_errors() as error:
            # metrics.jsonl has the row, and a mirror is no reason to end a run.
            self._run, self.reason = None, f"wandb's own process ended ({type(error).__name__})"
            self.notice = f"wandb: off ({self.reason}); metrics.jsonl goes on"
            logging.getLogger(__name__).warning(self.notice)


def beside(outputs_dir: str) -> Path:
    """The folder that outputs_dir lies in, and wandb/ beside it."""
    return Path(outputs_dir).absolute().parent


def legal_run_id(text: str, folder: Path) -> str:
    """Make an id that wandb takes (letters, digits, `_.-`, at most 64): the beginning of a text, and a hash of the
    folder's whole path, which no other run has."""
    legal = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:51].strip("-.") or "run"
    return f"{legal}-{sha256(os.fsencode(folder.resolve())).hexdigest()[:12]}"


def choose_mode(settings: LoggerSettings) -> tuple[str, str]:
    """Choose between online, offline and none, and say why.

    WANDB_MODE, then what `wandb offline` has stored, answer for `auto`; WANDB_MODE=disabled and
    WANDB_DISABLED=true switch every mode off.

    Raises:
        UserError: online is asked for and cannot be, or WANDB_MODE is no mode.
    """
    asked, why = settings.mode, f"logger.mode={settings.mode}"
    environment = os.environ.get("WANDB_MODE", "").lower()
    if asked == "none":
        return "none", why
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on"):
        return "none", "WANDB_DISABLED"
    if environment == "disabled":
        return "none", "WANDB_MODE=disabled"
    if asked == "auto" and environment:
        meanings = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline"}
        if environment not in meanings:
            raise UserError(f"WANDB_MODE={environment}: must be one of online, offline, disabled")
        asked, why = meanings[environment], f"WANDB_MODE={environment}"
    if asked == "offline":
        return "offline", why
    stored = _quiet_wandb().setup().settings.mode
    if asked == "auto" and stored != "online":
        return "none" if stored == "disabled" else "offline", f"`wandb {stored}` was run here"
    obstacle = _obstacle()
    if obstacle is None:
        return "online", why if asked == "online" else REACHABLE
    if asked == "online":
        raise UserError(f"{why}: {obstacle}; `wandb login` logs in, logger=offline needs neither account nor network")
    return "offline", obstacle


def _obstacle() -> str | None:
    """Obstacle that keeps a run from going online, None for none; asking takes PROBE_SECONDS at most."""
    wandb = _quiet_wandb()
    settings = wandb.setup().settings
    hosts = [urlsplit(settings.base_url).netloc]
    if settings.base_url == wandb.Settings.model_fields["base_url"].default:
        # Keys of the public server are kept under this name, whatever the server is called today.
        hosts.append("api.wandb.ai")
    if not (settings.api_key or settings.identity_token_file or any(map(has_netrc_key, hosts))):
        return "not logged in"
    if not answers(settings.base_url.rstrip("/") + "/graphql", PROBE_SECONDS):
        return f"no answer from {settings.base_url} within {PROBE_SECONDS:g} s"
    return None


def entity_of(settings: LoggerSettings) -> str:
    """User or team that runs belong to: the one that is named, or the default of the login."""
    return settings.entity or _quiet_wandb().Api().default_entity or ""


def _prepare_folder(folder: Path) -> None:
    # wandb would move to the system's temporary folder without a word.
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); logger=none needs no such folder") from error
    if not os.access(folder, os.W_OK | os.R_OK):
        raise UserError(f"{folder}: cannot be written to; logger=none needs no such folder")


def _quiet_wandb() -> Any:
    """Import wandb, which prints nothing: what there is to say is in `notice`.

    Raises:
        UserError: the user's own settings of wandb are illegal, or nobody knows the user's home folder.
    """
    # Its usage statistics hold up the end of the process for 20 seconds where the network is gone, and print errors.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb
    from pydantic import ValidationError

    try:
        wandb.setup(wandb.Settings(silent=True))
    except RuntimeError as error:
        raise UserError(f"wandb cannot be used: {error} Set HOME; logger=none needs no home folder") from error
    except ValidationError as error:
        # Only its words: the value may be a key.
        problem = error.errors()[0]
        name = problem["loc"][0]
        raise UserError(f"wandb's setting {name}, from the environment or its file: {problem['msg']}") from error
    return wandb


def wandb_errors() -> tuple[type[Exception], ...]:
    """Errors that wandb raises where its server refuses a run, and where its process has died."""
    from wandb.errors import Error
    from wandb.sdk.mailbox import HandleAbandonedError

    return Error, HandleAbandonedError, ConnectionError


def _init(arguments: dict[str, Any], *, mode: str, resume: str | None) -> Any:
    wandb = _quiet_wandb()
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_disable_stats=True,
        x_save_requirements=False,
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        login_timeout=1.0,
    )
    # A run that the caller's own program has open is neither returned nor ended.
    return wandb.init(**arguments, mode=mode, resume=resume, reinit="create_new", settings=settings)
