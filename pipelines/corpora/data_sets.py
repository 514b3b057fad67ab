"""Tables by ``datasets``: local parquet and CSV files, and data sets on the hub, all streamed."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headscan.checkpoints.hub import hub_answers, hub_problem
from headscan.pipelines.corpora.corpus_spec import CorpusError, CorpusSpec
from headscan.pipelines.corpora.documents import Entry, choose_column, value_entry
from headscan.pipelines.corpora.files import LocalFile
from headscan.pipelines.corpora.texts import unreadable

if TYPE_CHECKING:
    from datasets import IterableDataset


def read_table(file: LocalFile, column: str | None) -> Iterator[Entry]:
    """The rows of a parquet, CSV or TSV file. Damage becomes an entry that stands for the rest of the file."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    # The default batch is the first row group, which may be empty (an error in datasets) or larger than memory.
    builder: str = "parquet"
    options: dict[str, Any] = {"batch_size": 1000}
    if file.suffix != ".parquet":
        # A cell that says "NA" or "null" is text, not a missing value.
        builder, options = "csv", {"keep_default_na": False, "sep": "\t" if file.suffix == ".tsv" else ","}
    rows = 0
    try:
        with file.path.open("rb"):
            pass  # a file that may not be read is the user's to mend, not damage
    except OSError as error:
        raise unreadable(file.path, error) from error
    try:
        # A name with brackets is a pattern to datasets, and one that matches nothing is silently an empty table.
        pattern = glob.escape(str(file.path.absolute()))
        data = load_dataset(builder, data_files=pattern, split="train", streaming=True, **options)
        for entry in read_rows(data, column, file.name):
            yield entry
            rows += 1
    except (ValueError, OSError, DatasetsError) as error:  # the errors of pandas and pyarrow are ValueError or OSError
        yield Entry(file.name, None, "undecodable", f"damaged after row {rows}: {one_line(error)}")


def open_hub(spec: CorpusSpec) -> IterableDataset:
    """The hub data set that ``spec`` names, streaming; nothing but its description is fetched yet.

    Raises:
        CorpusError: it cannot be reached, does not exist, or lacks the config, split or revision.
    """
    from datasets import load_dataset

    if not hub_answers():
        raise CorpusError(
            f"corpus {spec.name!r} is not built in, is no file or folder, and {hub_problem()}: check the name or the "
            "network, or give a file or folder"
        )
    try:
        return load_dataset(spec.name, spec.config, split=spec.split, revision=spec.revision, streaming=True)
    except (FileNotFoundError, ConnectionError) as error:
        raise CorpusError(
            f"corpus {spec.name!r} is not built in, is no file or folder, and the hub gave: {one_line(error)};"
            " check the name, or offline give a file or folder"
        ) from error
    except Exception as error:  # a wrong config or split, a gated set, a network library's own error
        raise CorpusError(f"hub corpus {spec.name!r} cannot be opened: {one_line(error)}") from error


def read_hub(spec: CorpusSpec, data: IterableDataset) -> Iterator[Entry]:
    """The documents of a hub data set.

    Raises:
        CorpusError: the column is unknown, or the stream broke off (network, damaged files).
    """
    where = f"{spec.name}/{spec.config}" if spec.config else spec.name
    rows = 0
    try:
        for entry in read_rows(data, spec.column, f"{where}/{spec.split}"):
            yield entry
            rows += 1
    except CorpusError:
        raise
    except Exception as error:  # the network's and every file format's errors come through here
        # What is missing is of unknown size, so going on would pass a part for the whole.
        message = f"hub corpus {where!r} broke off after row {rows}: {one_line(error)}; run the same command again"
        raise CorpusError(message) from error


def read_rows(data: IterableDataset, column: str | None, where: str) -> Iterator[Entry]:
    """Entries of the rows of a streamed data set, ``where:1``, ``where:2``, ..."""
    if data.features is not None:
        columns = {name: getattr(kind, "dtype", None) in _STRINGS for name, kind in data.features.items()}
        chosen = choose_column(columns, column, where)
        # Other columns may be images, slow to decode and in need of a library of their own.
        data = data.select_columns([chosen])
    else:
        first = next(iter(data), None)
        if first is None:
            return
        columns = {name: value is None or isinstance(value, str) for name, value in first.items()}
        chosen = choose_column(columns, column, where)
    row: dict[str, Any]
    for number, row in enumerate(data, 1):
        yield value_entry(f"{where}:{number}", row[chosen], chosen)


_STRINGS = {"string", "large_string", "string_view"}


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's message on one line of at most ``limit`` characters, or its type where it has none."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= limit else message[: limit - 3] + "..."
