"""The hidden folder beside the output in which a pruning builds its models, and from which it resumes.

A model is finished when its record lies beside it. Finished models move to their places, with their records, once a
process of their own has loaded them and computed the same logits. The folder goes when the run is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from headscan.checkpoints.headers import weights_hash
from headscan.errors import HeadscanError, PruningError
from headscan.grid import Head
from headscan.models.loaded_model import LoadedModel
from headscan.pruning.save_model import check_output_folder, check_reload, save_logits, save_pruned
from headscan.runs.progress import at_work
from headscan.steps.prune.held_out_losses import LossChange
from headscan.steps.prune.model_costs import CostComparison, ModelCost
from headscan.steps.prune.pruned_arms import BuiltModel
from headscan.store.output_files import write_text

#: Locked by the process that works in a folder; the system unlocks it when the process ends.
_LOCK = ".lock"


@contextmanager
def owned_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a temporary folder, removed on exit; first remove those of the same prefix whose processes have ended."""
    for old in parent.glob(f"{prefix}*"):
        if (old / _LOCK).is_file():
            with suppress(Timeout), _lock(old):
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name, _lock(Path(name)):
        yield Path(name)


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / _LOCK, timeout=0)


_SETTINGS = "settings.json"
#: Record of a model in its own folder, where it is moved with the weights.
_DELIVERED = "pruning.json"


@dataclass(frozen=True)
class WorkFolder:
    """The folder in which a run builds. ``targets`` are the places of the models that are no controls; the model of the
    first one is built in ``path/0``.
    """

    path: Path
    targets: tuple[Path, ...]

    def deliver(
        self, built: Iterable[BuiltModel], card: Callable[[BuiltModel], str], say: Callable[[str], None]
    ) -> tuple[BuiltModel, ...]:
        """Check finished models in a fresh process and move them to their places, where `delivered_model` reads them;
        controls stay. ``card`` returns the text of a model's ``README.md``.
        """
        models = tuple(built)
        places = {each.folder: self.targets[int(each.folder.name)] for each in models if not each.is_control}
        waiting = [each for each in models if each.folder in places and each.folder.exists()]
        if waiting:
            say("loading what was saved in another process, to compare its logits")
            with at_work("comparing logits"):
                check_reload({each.folder: _logits_file(each.folder) for each in waiting})
        for each in waiting:
            write_text(each.folder / "README.md", card(each))
            shutil.copyfile(_record_file(each.folder), each.folder / _DELIVERED)
            places[each.folder].parent.mkdir(parents=True, exist_ok=True)
            each.folder.replace(places[each.folder])
        return tuple(replace(each, folder=places.get(each.folder, each.folder)) for each in models)


def check_place(out: Path) -> None:
    """Raise if a folder holds something that no unfinished run put there, or if no model can be moved to its place."""
    place = out.absolute()
    for refused, what in (
        (os.path.ismount(place), "a mount point"),
        (place.is_symlink(), "a link"),
        (place.resolve() == Path.cwd(), "the current folder"),
    ):
        if refused:
            raise PruningError(
                f"no model can be moved to {place}, {what}. Choose a new folder, such as {out / 'model'}"
            )
    places = [out / name for name in _read_json(_work(out) / _SETTINGS).get("targets", ())]
    present = [out] if out in places or not out.is_dir() else list(out.iterdir())
    if all(each in places and _is_finished(_work(out), places.index(each), each) for each in present):
        return
    if delivered_model(out) or (present and all(map(delivered_model, present))):
        raise PruningError(
            f"{out} holds a finished pruned model. `headscan report` shows its verdict, if it was judged; `headscan "
            "evaluate` with it as one of the models makes another. To prune again, choose a new folder"
        )
    check_output_folder(out)


@contextmanager
def work_folder(
    out: Path, targets: Sequence[Path], settings_hash: str, say: Callable[[str], None]
) -> Iterator[WorkFolder]:
    """Yield the folder of a run, with the models that an earlier one with the same ``settings_hash`` (of everything on
    which the models depend) finished. If the block fails, the folder stays if it has a finished model, which ``say``
    reports. ``targets`` are ``out`` or folders in it.
    """
    path = _work(out)
    with claimed(path, out, PruningError):
        try:
            _prepare(path, out, targets, settings_hash)
        except BaseException:
            (path / _LOCK).unlink()
            with suppress(OSError):  # models of an earlier run stay
                path.rmdir()
            raise
        for each in [folder for folder in path.iterdir() if folder.is_dir()]:
            if not _record_file(each).is_file():  # the run ended while it was written
                shutil.rmtree(each)
        moved = [
            _record_file(path / str(number)) for number, each in enumerate(targets) if _is_finished(path, number, each)
        ]
        for record in path.glob("*.json"):
            if record.name != _SETTINGS and record not in moved and not record.with_suffix("").is_dir():
                record.unlink()  # the finished model was removed or changed
        try:
            yield WorkFolder(path, tuple(targets))
        except BaseException:
            if not any(_record_file(path / str(number)).is_file() for number in range(len(targets))):
                shutil.rmtree(path, ignore_errors=True)
            else:
                say(f"{path} keeps what is finished; the same command resumes")
            raise
        shutil.rmtree(path)


@contextmanager
def claimed(path: Path, out: Path, error: type[HeadscanError]) -> Iterator[None]:
    """Lock the folder in which ``out`` is built, for one process; raise ``error`` if another has it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path).acquire()
    except Timeout as taken:
        raise error(
            f"{out} is being built by another process (limit 1). Wait for it, or choose another folder"
        ) from taken
    except OSError as problem:
        raise error(f"{path} cannot be written: {problem.strerror}. Choose another folder") from problem
    with lock:
        yield


def _prepare(path: Path, out: Path, targets: Sequence[Path], settings_hash: str) -> None:
    """Check the place of the models, empty a folder of other settings, and record these."""
    check_place(out)
    if _read_json(path / _SETTINGS).get("settings") != settings_hash:
        if out.exists() and any(out.iterdir()):
            raise PruningError(
                f"{out} is not empty: an unfinished run with other settings, or another version of headscan, saved a "
                f"model there. Choose a new folder, or delete {out} and {path}"
            )
        for each in path.iterdir():
            if each.is_dir():
                shutil.rmtree(each)
            elif each.name != _LOCK:
                each.unlink()
    names = [str(each.relative_to(out)) for each in targets]
    write_text(path / _SETTINGS, json.dumps({"settings": settings_hash, "targets": names}))


def write_model(lm: LoadedModel, built: BuiltModel, remote_code: bool) -> None:
    """Save a model and then its record, which makes it finished."""
    save_pruned(lm, built.folder, remote_code=remote_code)
    if not built.is_control:
        save_logits(lm, _logits_file(built.folder))
    record = asdict(built) | {"folder": built.folder.name, "weights": weights_hash(built.folder)}
    write_text(_record_file(built.folder), json.dumps(record))


def read_model(folder: Path) -> BuiltModel | None:
    """Return the model that was built in a folder, from its record; None if it is not finished."""
    record = _read_json(_record_file(folder))
    return _model(folder, record) if record else None


def delivered_model(folder: Path) -> BuiltModel | None:
    """Return the model that a run moved to a folder; None if there is none, or if its weights changed."""
    record = _read_json(folder / _DELIVERED)
    try:
        return _model(folder, record) if record and record["weights"] == weights_hash(folder) else None
    except (KeyError, TypeError):  # a file of the same name, or the record of another version
        return None


def _model(folder: Path, record: dict[str, Any]) -> BuiltModel:
    del record["weights"]
    read = {
        "folder": folder,
        "removed": tuple(Head(*head) for head in record["removed"]),
        "skipped": tuple(record["skipped"]),
        "costs": CostComparison(**{key: ModelCost(**cost) for key, cost in record["costs"].items()}),
        "losses": {task: LossChange(**change) for task, change in record["losses"].items()},
    }
    return BuiltModel(**record | read)


def _work(out: Path) -> Path:
    return out.absolute().parent / f".{out.name}-pruning"


def _record_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _logits_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.logits")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_finished(work: Path, number: int, target: Path) -> bool:
    """Return True if a folder is the model that a run moved there, as it was."""
    record = _read_json(_record_file(work / str(number)))
    return bool(record) and record["weights"] == weights_hash(target)
