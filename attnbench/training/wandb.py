"""Mirror in wandb of results on disk. wandb is imported only here, and not in mode `none`."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from attnbench.machine.environment import answers
from attnbench.settings.errors import UserError
from attnbench.settings.schema import LoggerSettings

PROBE_SECONDS = 1.5
"""Longest wait for wandb's server before a run is logged offline."""
INIT_SECONDS = 15.0
"""Longest wait until a reachable server accepts the run."""
FINISH_SECONDS = 20.0
"""Longest wait for uploads at the end of a run; `wandb sync` uploads the rest."""
REACHABLE = "logged in, and the server can be reached"


LINES, BARS = "wandb/lineseries/v0", "wandb/bar/v0"
FIELDS = {LINES: ("step", "lineKey", "lineVal"), BARS: ("label", "value")}
"""Columns of the points that wandb's own kinds of charts draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    kind: str
    """One of FIELDS."""
    strings: dict[str, str]
    points: list[list[Any]]


class WandbMirror:
    """Mirror of a MetricsLog in wandb, online or offline.

    Waits for the network at most PROBE_SECONDS + INIT_SECONDS at the start and FINISH_SECONDS at the end. wandb's own
    process uploads; data that it could not upload are in root/wandb, for `wandb sync`. Code, git state, console output
    and system statistics are not recorded.

    A row's `split` becomes the prefix of its numbers (train/loss), and `tokens` is the horizontal axis.

    Args:
        root: parent folder of wandb/.
        folder: identifies the run; its offline copy that was not uploaded is replaced.
        resume: the run continues from a checkpoint; `replay` then gives the earlier rows.

    Attributes:
        mode, reason: online, offline or none, and why.
        notice: a line to print.
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
        try:
            (root / "wandb").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"{root / 'wandb'}: cannot be made ({error.strerror}); logger=none needs no such folder"
            raise UserError(text) from error
        # wandb would silently use the system's temporary folder instead.
        if not os.access(root / "wandb", os.W_OK | os.R_OK):
            raise UserError(f"{root / 'wandb'}: cannot be written to; logger=none needs no such folder")
        # Tables wait there for `wandb sync`, rather than in the user's home.
        os.environ.setdefault("WANDB_DATA_DIR", arguments["dir"] + "/wandb")
        stale = [file.parent for file in (root / "wandb").glob(f"offline-run-*/run-{arguments['id']}.wandb")]
        if self.mode == "online":
            try:
                self._run = _init(arguments, mode="online", resume="allow" if resume else None)
            except wandb_errors() as error:
                # The first line names the cause, the others advise.
                answer = str(error).splitlines()[0]
                if must_be_online:
                    raise UserError(f"{self.reason}: wandb's server refused the run: {answer}") from error
                self.mode, self.reason = "offline", f"the server refused the run: {answer}"
                # wandb's process keeps the id of a run that it could not start.
                _quiet_wandb().teardown()
        if self._run is None:
            self._run = _init(arguments, mode="offline", resume=None)
        self._first_step = self._run.starting_step
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")
        for folder in stale:
            # Uploaded copies stay; `wandb sync` skips them.
            if not any(folder.glob("*.synced")):
                shutil.rmtree(folder)
        if self.mode == "online":
            self.notice = f"wandb: online at {self._run.url}"
        else:
            folder = os.path.relpath(self._run.settings.sync_dir)
            self.notice = f"wandb: offline ({self.reason}); view with `wandb leet`, upload with `wandb sync`: {folder}"

    def replay(self, rows: Iterable[dict[str, Any]]) -> None:
        """A server that has the rows gets none twice."""
        for row in rows:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        """Log a row of metrics.jsonl; steps never decrease."""
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
        charts: Mapping[str, Chart],
        summary: Mapping[str, float],
        report: Path | None = None,
    ) -> None:
        if self._run is None:
            return
        wandb = _quiet_wandb()
        content = {name: wandb.Table(columns=list(columns), data=rows) for name, (columns, rows) in tables.items()}
        for name, chart in charts.items():
            fields = FIELDS[chart.kind]
            points = wandb.Table(columns=list(fields), data=chart.points)
            content[name] = wandb.plot_table(chart.kind, points, {field: field for field in fields}, chart.strings)
        self._send(lambda: (self._run.log(content), self._run.summary.update(dict(summary))))
        if report is not None and self._run is not None:
            artifact = wandb.Artifact(f"{self._run.id}-report", "report")
            artifact.add_dir(str(report))
            self._send(lambda: self._run.log_artifact(artifact))

    def close(self, exit_code: int = 0) -> None:
        """End the run, as failed if `exit_code` is not 0."""
        run, self._run = self._run, None
        if run is not None:
            self._send(lambda: run.finish(exit_code=exit_code))

    def _send(self, act: Callable[[], object]) -> None:
        try:
            act()
        except wandb_errors() as error:
            # metrics.jsonl has the row; a mirror must not end a run.
            self._run, self.reason = None, f"wandb's own process ended ({type(error).__name__})"
            self.notice = f"wandb: off ({self.reason}); metrics.jsonl continues"
            logging.getLogger(__name__).warning(self.notice)


def beside(outputs_dir: str) -> Path:
    return Path(outputs_dir).absolute().parent


def legal_run_id(text: str, folder: Path) -> str:
    """Return an id that wandb accepts (letters, digits, `_.-`, at most 64), unique for the folder."""
    legal = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:51].strip("-.") or "run"
    return f"{legal}-{sha256(os.fsencode(folder.resolve())).hexdigest()[:12]}"


def choose_mode(settings: LoggerSettings) -> tuple[str, str]:
    """Choose online, offline or none, with the reason. WANDB_MODE, then the mode that `wandb offline` stored, decide
    for `auto`; WANDB_MODE=disabled and WANDB_DISABLED=true turn every mode off."""
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
    wandb = _quiet_wandb()
    # A dependency of wandb, which finds keys with it too.
    from requests.utils import get_netrc_auth

    settings = wandb.setup().settings
    urls = [settings.base_url]
    if settings.base_url == wandb.Settings.model_fields["base_url"].default:
        # Keys of the public server are stored under this name.
        urls.append("https://api.wandb.ai")
    keys = [settings.api_key, settings.identity_token_file, *((get_netrc_auth(url) or ("", ""))[1] for url in urls)]
    if not any(keys):
        return "not logged in"
    if not answers(settings.base_url.rstrip("/") + "/graphql", PROBE_SECONDS):
        return f"no answer from {settings.base_url} within {PROBE_SECONDS:g} s"
    return None


def entity_of(settings: LoggerSettings) -> str:
    return settings.entity or _quiet_wandb().Api().default_entity or ""


def _quiet_wandb() -> Any:
    # Its usage statistics delay the end of the process by 20 seconds without a network, and print errors.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb
    from pydantic import ValidationError

    try:
        wandb.setup(wandb.Settings(silent=True))
    except RuntimeError as error:
        raise UserError(f"wandb cannot be used: {error} Set HOME; logger=none needs no home folder") from error
    except ValidationError as error:
        # Without the value, which may be a key.
        problem = error.errors()[0]
        name = problem["loc"][0]
        raise UserError(f"wandb's setting {name}, from the environment or its file: {problem['msg']}") from error
    return wandb


def wandb_errors() -> tuple[type[Exception], ...]:
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
    # A run that the calling program has open is neither returned nor ended.
    return wandb.init(**arguments, mode=mode, resume=resume, reinit="create_new", settings=settings)
