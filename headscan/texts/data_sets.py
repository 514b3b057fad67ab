"""Stream tables with ``datasets``, from files or the hub."""

from __future__ import annotations

import csv
import glob
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headscan.checkpoints.headers import hub_answers, hub_problem
from headscan.errors import one_line
from headscan.settings.corpus_settings import CorpusError, CorpusSpec
from headscan.texts.documents import Entry, LocalFile, choose_column, encoding_of, unreadable, value_entry

if TYPE_CHECKING:
    from datasets import IterableDataset


def read_table(file: LocalFile, column: str | None) -> Iterator[Entry]:
    """Yield the rows of a parquet, CSV or TSV file. Damage becomes one entry for the rest of the file."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    # The default batch is the first row group, which may be empty (an error in datasets) or larger than memory.
    builder: str = "parquet"
    options: dict[str, Any] = {"batch_size": 1000}
    if file.suffix != ".parquet":
        # A cell "NA" or "null" is text, not a missing value.
        builder, options = "csv", {"keep_default_na": False}
        if file.suffix == ".tsv":
            # The format has no quotes: one in a text would join it with the rows up to the next quote.
            options |= {"sep": "\t", "quoting": csv.QUOTE_NONE}
    rows = 0
    try:
        with file.path.open("rb") as content:  # an unreadable file is an error of the user, not damage
            encoding = encoding_of(content.read(4))
    except OSError as error:
        raise unreadable(file.path, error) from error
    if builder == "csv" and encoding != "utf-8-sig":
        options |= {"encoding": encoding}
    try:
        # datasets reads brackets in a name as a pattern, and gives an empty table if nothing matches.
        pattern = glob.escape(str(file.path.absolute()))
        data = load_dataset(builder, data_files=pattern, split="train", streaming=True, **options)
        for entry in read_rows(data, column, file.name):
            yield entry
            rows += 1
    except (ValueError, OSError, DatasetsError) as error:  # the errors of pandas and pyarrow are ValueError or OSError
        yield Entry(file.name, None, "undecodable", f"damaged after row {rows}: {one_line(error)}")


def open_hub(spec: CorpusSpec) -> IterableDataset:
    """Open a hub data set for streaming; this fetches only its description."""
    from datasets import load_dataset

    if not hub_answers():
        raise CorpusError(
            f"corpus {spec.name!r} is not built in and is no file or folder, and {hub_problem()}. Check the name or "
            "the network, or give a file or folder"
        )
    try:
        return load_dataset(spec.name, spec.config, split=spec.split, revision=spec.revision, streaming=True)
    except (FileNotFoundError, ConnectionError) as error:
        raise CorpusError(
            f"corpus {spec.name!r} is not built in and is no file or folder, and the hub returned: "
            f"{one_line(error).rstrip('.')}. Check the name; offline, give a file or folder"
        ) from error
    except Exception as error:  # a wrong config or split, a gated set, a network library's own error
        reason = one_line(error).rstrip(".")
        raise CorpusError(f"cannot open hub corpus {spec.name!r}: {reason}. Check its settings and access") from error


def read_hub(spec: CorpusSpec, data: IterableDataset) -> Iterator[Entry]:
    where = f"{spec.name}/{spec.config}" if spec.config else spec.name
    rows = 0
    try:
        for entry in read_rows(data, spec.column, f"{where}/{spec.split}"):
            yield entry
            rows += 1
    except CorpusError:
        raise
    except Exception as error:  # errors of the network and of every file format
        # The missing rest has an unknown size, so the corpus must not look complete.
        message = f"hub corpus {where!r} failed after row {rows}: {one_line(error)}. Run the same command again"
        raise CorpusError(message) from error


def read_rows(data: IterableDataset, column: str | None, where: str) -> Iterator[Entry]:
    """Yield a streamed data set's rows as ``where:1``, ``where:2``, ..."""
    if data.features is not None:
        dtypes = {name: str(getattr(kind, "dtype", None)) for name, kind in data.features.items()}
        columns = {name: dtype in _STRINGS for name, dtype in dtypes.items()}
        # Bytes are often images, so they count as text only by name, or if nothing else can be the text.
        strings = any(columns.values())
        columns |= {
            name: name in (column, "text") or not strings for name, dtype in dtypes.items() if _BYTES.match(dtype)
        }
        chosen = choose_column(columns, column, where)
        # Other columns may be images, which are slow to decode and need another library.
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
_BYTES = re.compile("(large_|fixed_size_)?binary")
