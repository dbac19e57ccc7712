"""Run benchmarks and write benchmarks/results/NAME.json and .md: python benchmarks/run.py [NAME ...]."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TITLES = {
    "adopted": "Models of transformers, beside the zoo and cp",
    "conversion": "Conversion against cp and transformers",
    "resharding": "Resharding against cp and torch.distributed.checkpoint",
    "loss": "Output layer and loss against torch's",
    "plan": "Predicted steps against measured ones, in drawn layouts",
    "pipeline": "Waiting in a pipeline, under each schedule, against the formula",
    "startup": "Starts: the import, the help, the first step, plans",
    "manifests": "Manifests of checkpoints of many ranks",
    "saving": "Saving against a raw write and torch.distributed.checkpoint",
    "training": "Training steps against other libraries'",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*TITLES, []], help="default: all")
    parser.add_argument("--folder", default="/dev/shm", help="where the files go; some GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", metavar="PATTERN", help="of training, only rows whose title it matches")
    parser.add_argument("--busy", action="store_true", help="measure beside other work all the same")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.only is not None and (options.names != ["training"] or options.results == HERE / "results"):
        parser.error("--only is for training alone, and needs --results: the whole table stays as it is")
    if not Path(options.folder).is_dir():
        parser.error(f"--folder: expected a folder, found {options.folder}")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile what an install has compiled
    sys.path.insert(0, str(HERE))
    from measure import check_load, machine, write_results

    for name in options.names or TITLES:
        if not options.busy:
            check_load()
        facts = machine()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            chosen = {} if options.only is None else {"only": options.only}
            rows = importlib.import_module(name).main(Path(folder), options.rounds, **chosen)
        facts["load at the end"] = round(os.getloadavg()[0], 2)
        write_results(options.results / name, TITLES[name], rows, facts)
        print((options.results / f"{name}.md").read_text())
    if options.results == HERE / "results":
        importlib.import_module("pictures").speeds()


if __name__ == "__main__":
    main()
