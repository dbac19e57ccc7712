"""Read rows of Parquet files, and of Arrow files in folders that ``Dataset.save_to_disk`` writes."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...parallel_state import BadInput, require
from ...storage.small_files import read_json
from ...system import OverLimit, bounded

#: Some rows, their columns as keys, and how many bytes of the input have been read so far.
Portion = tuple[list[dict[str, Any]], int]
#: The columns to read, of those that there are.
Choose = Callable[[list[str], Path], list[str]]

_ROWS = 1024

#: Bytes that rows read at once should have, and bytes that they may need. A small compressed row may unpack
#: to any size, which only the memory in use shows.
_GOOD_SIZE, MOST_MEMORY = 2**24, 2**30


def need(package: str, path: Path) -> Any:
    """Import the package that reads ``path``, an extra; ``BadInput`` says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        todo = f"Install the extra data of trilith, or: pip install {package}"
        raise BadInput(path, expected=f"the {package} package to read it", found="none", todo=todo) from error


def read_rows(path: Path, choose: Choose) -> Iterator[Portion]:
    """Yield the rows of a Parquet file, or of a data set's folder, in order.

    Raises ``BadInput`` for what is no such file, and for rows that take too much memory to unpack.
    """
    pyarrow, before = need("pyarrow", path), 0
    read = _arrow_rows if path.is_dir() else _parquet_rows
    for file in dataset_files(path) if path.is_dir() else [path]:
        portions = read(file, choose)
        while True:
            try:
                with bounded(memory=MOST_MEMORY):  # pyarrow has a MemoryError of its own
                    portion = next(portions, None)
            except OverLimit as error:
                expected = f"rows that are unpacked within {error}"
                todo, actual = "Write the file anew with shorter rows", "some that need more"
                raise BadInput(file, "rows", expected=expected, found=actual, todo=todo) from None
            except (pyarrow.ArrowException, OSError) as error:
                expected = "a stream of Arrow tables" if path.is_dir() else "a Parquet file"
                raise BadInput(file, expected=expected, found=" ".join(str(error).split())[:200]) from error
            if portion is None:
                break
            yield portion[0], before + portion[1]
        before += file.stat().st_size


def _parquet_rows(path: Path, choose: Choose) -> Iterator[Portion]:
    file = importlib.import_module("pyarrow.parquet").ParquetFile(path)
    columns = choose(file.schema_arrow.names, path)
    rows = _rows_at_once(file.metadata, columns)
    size, done, total = path.stat().st_size, 0, max(file.metadata.num_rows, 1)
    for batch in file.iter_batches(batch_size=rows, columns=columns):
        done += batch.num_rows
        yield batch.to_pylist(), size * done // total
    fits = done == file.metadata.num_rows
    require(fits, path, "rows", f"{file.metadata.num_rows:,}, as its footer says", f"{done:,}")


def _rows_at_once(metadata: Any, columns: list[str]) -> int:
    """Return the number of rows that make about ``_GOOD_SIZE`` bytes, by what the file says about its
    columns.
    """
    size, rows = 0, int(metadata.num_rows)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.partition(".")[0] in columns:
                size += max(int(column.total_uncompressed_size), 0)
    return max(1, min(_ROWS, _GOOD_SIZE * rows // max(size, 1)))


def _arrow_rows(path: Path, choose: Choose) -> Iterator[Portion]:
    pyarrow, ipc = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.ipc")
    with pyarrow.memory_map(str(path)) as source, ipc.open_stream(source) as reader:
        columns = choose(reader.schema.names, path)
        for batch in reader:
            for first in range(0, batch.num_rows, _ROWS):
                yield batch.select(columns).slice(first, _ROWS).to_pylist(), source.tell()


def dataset_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a data set's folder, in their order; ``BadInput`` for any other folder."""
    if (folder / "dataset_dict.json").is_file():
        names = sorted(path.parent.name for path in folder.glob("*/state.json"))
        todo = f"Name one, such as {folder / names[0]}" if names else ""
        raise BadInput(folder, expected="one data set", found=f"several: {', '.join(names)}", todo=todo)
    if not (folder / "state.json").is_file():
        expected = "a regular file, or a folder written by datasets' save_to_disk"
        todo = "Name the files in it"
        raise BadInput(folder, expected=expected, found="a folder with no state.json", todo=todo)
    state = read_json(folder / "state.json")
    try:
        files = [folder / Path(str(part["filename"])).name for part in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise BadInput(
            folder / "state.json", "_data_files", expected="a list of file names", found="something else"
        ) from error
    for file in files:
        require(file.is_file(), file, None, "a file that state.json names", "nothing there")
    return files
