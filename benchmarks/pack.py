"""Make the rows of a survey a third as long, without loss.

python benchmarks/pack.py FILE   rewrite a file of `deep-gemm calibrate survey`
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from deep_gemm.bench import survey
from deep_gemm.bench.result_rows import PACKED, Row

COMMON = ("device", "driver", "cuda", "torch", "date", "source_digest")


def pack(rows: Sequence[Row]) -> str:
    """Rows of a survey as text that is a third as long, without loss. `survey.load` reads it.

    A line of mode "packed" comes first, with the names of all configs, the most frequent first. In its row, ``times``
    is a pair of lists: places in these names, and times. Fields of `COMMON` are in further lines of mode "packed",
    where they change.
    """
    counts = Counter(name for row in rows for name in row["times"])
    names = [name for name, _ in counts.most_common()]
    place = {name: index for index, name in enumerate(names)}
    lines: list[Row] = [{"mode": PACKED, "configs": names}]
    common: Row = {}
    for row in rows:
        of_row = {name: row[name] for name in COMMON if name in row}
        if of_row != common:
            common = of_row
            lines.append({"mode": PACKED, "common": common})
        own = {name: value for name, value in row.items() if name not in COMMON}
        lines.append(own | {"times": [[place[name] for name in row["times"]], list(row["times"].values())]})
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(pack(survey.load([Path(sys.argv[1])])))
