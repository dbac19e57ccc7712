"""List which of the known bad inputs and kills have a test (`make faults`).

The number of a case stands in the name of its test. A: bytes of a safetensors file. B: index and set of
files. C: tensors. D: config, and determinism. E: layout and launch. F: data and tokenizer. G: checkpoint
folder and output. K: kills.
"""

import re
import subprocess
import sys
from pathlib import Path

CASES = {"A": 36, "B": 19, "C": 18, "D": 29, "E": 20, "F": 14, "G": 26, "K": 19}


def found_in(names):
    return {
        match[1].upper() + match[2]
        for match in re.finditer(r"(?<![A-Za-z0-9])([A-Ga-gKk])(\d{1,2})(?=[a-c]?(?![A-Za-z0-9]))", names)
    }


def main():
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow"],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    known = found_in(collected.stdout.replace("_", "-"))
    missing = []
    for family, count in CASES.items():
        cases = [f"{family}{number}" for number in range(1, count + 1)]
        print(f"{family}: {sum(case in known for case in cases)} of {count}")
        missing += [case for case in cases if case not in known]
    for case in missing:
        print(f"{case} has no test")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
