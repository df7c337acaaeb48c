"""Users' own expressions as the activation of an epilogue: see `deep_gemm.Epilogue.custom`."""

from __future__ import annotations

import re
import textwrap

from .errors import InvalidInputError
from .names import SURE_MISTAKES, is_name
from .parts import MARK, MAX_VECTORS, VECTORS
from .records import record

_STRUCT = """struct Custom {{
  enum : u32 {{ kRows = {rows}, kColumns = {columns} }};  // vectors
  enum : bool {{ kNeedsRow = {needs_row}, kNeedsColumn = {needs_column} }};
#pragma nv_diagnostic push
{mistakes}
  static DG_DEVICE float {name}({parameters}) {{
{body}
  }}
#pragma nv_diagnostic pop
  static DG_DEVICE float apply(float x, u32 row, u32 column, const float* rows, const float* columns) {{
    return {name}({values});
  }}
}};"""


@record(frozen=True)
class Expression:
    """Statements ``body`` in C++ that return what becomes of a sum ``x`` in ``row`` and ``column`` of D. The float32
    vectors ``rows`` and ``columns`` have an element for each row and for each column of D. By their names, ``body``
    finds the elements of its row and column."""

    name: str
    body: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        """It identifies the expression in specs and params; `parse` reads it."""
        return f"{MARK}{self.name}({','.join(self.rows)};{','.join(self.columns)}) {self.body}"

    @classmethod
    def parse(cls, text: str) -> Expression:
        """The expression of a text, without `MARK`."""
        found = re.fullmatch(r"(\w+)\(([\w,]*);([\w,]*)\) (.*)", text, re.DOTALL)
        name, *vectors, body = found.groups() if found else ("", "", "", "")
        rows, columns = (tuple(filter(None, names.split(","))) for names in vectors)
        names = {*rows, *columns}
        if not all(map(is_name, (name, *names))) or not len(rows + columns) == len(names) <= MAX_VECTORS:
            raise InvalidInputError(
                f"an expression of an epilogue must be given as {MARK}NAME(ROWS;COLUMNS) BODY, with names of at most "
                f"{MAX_VECTORS} vectors apart by commas, but it is {MARK}{text}"
            )
        return cls(name, body, rows, columns)

    def uses(self, word: str) -> bool:
        """Whether the body has this word."""
        return re.search(rf"\b{word}\b", self.body) is not None

    @property
    def labels(self) -> dict[str, str]:
        """What messages call each operand of `VECTORS` that there is."""
        found = [f"rows[{name!r}]" for name in self.rows] + [f"columns[{name!r}]" for name in self.columns]
        return dict(zip(VECTORS, found, strict=False))

    @property
    def device_code(self) -> str:
        """The struct in whose place ``finish.cuh`` has an activation of its own."""
        own = [f"float {name}" for name in (*self.rows, *self.columns)]
        values = [f"rows[{index}]" for index in range(len(self.rows))]
        values += [f"columns[{index}]" for index in range(len(self.columns))]
        return _STRUCT.format(
            mistakes=SURE_MISTAKES,
            name=f"of_{self.name}",
            rows=len(self.rows),
            columns=len(self.columns),
            needs_row=str(bool(self.rows) or self.uses("row")).lower(),
            needs_column=str(self.uses("column")).lower(),
            parameters=", ".join(("float x", "u32 row", "u32 column", *own)),
            values=", ".join(("x", "row", "column", *values)),
            body=textwrap.indent(self.body, "    "),
        )
