"""Drawings of docs/assets: the layouts, the pipeline of a kernel, the choice of one. Wide enough for a phone, no wider.

    python -m tools.drawings

Each has its own background, light or dark as the reader's system is, so that it can be read on either kind of page.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "docs" / "assets"

WIDTH = 440
LEFT, RIGHT = 12, WIDTH - 12
ROW = 30
"""Height of a box of one line."""

_STYLE = """
  svg { font-family: "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 12px }
  .page { fill: #ffffff } text { fill: #1b1b1b } rect, path { stroke: #444; stroke-width: 1 } path { fill: none }
  .head { font-weight: 600 } .note { font-size: 11px }
  .a { fill: #cfe5f5 } .b { fill: #d5efe4 } .c { fill: #fbe3d0 } .d { fill: #f3dcea } .o { fill: #f4f4f4 }
  .here { stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1e2129 } text { fill: #e6e6e6 } rect, path { stroke: #aaa }
    .a { fill: #1f4e70 } .b { fill: #1f5a45 } .c { fill: #6f431d } .d { fill: #5d3150 } .o { fill: #33363f }
  }
"""


class Drawing:
    """Grows downwards: `y` is where the next row begins."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.y = 12.0
        self.parts: list[str] = []

    def text(self, text: str, x: float = LEFT, kind: str = "", anchor: str = "start", below: float = 6) -> None:
        self.y += 12
        self._word(text, x, self.y, kind, anchor)
        self.y += below

    def _word(self, text: str, x: float, y: float, kind: str = "", anchor: str = "middle") -> None:
        attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{attribute}>{html.escape(text)}</text>')

    def boxes(
        self,
        texts: Sequence[str],
        kind: str | Callable[[int], str] = "o",
        left: float = LEFT,
        right: float = RIGHT,
        here: int | None = None,
        height: float = ROW,
    ) -> float:
        """A row of boxes of one width, which is returned; lines of a text are apart by a line break."""
        width = (right - left) / len(texts)
        for i, text in enumerate(texts):
            x, name = left + i * width, kind if isinstance(kind, str) else kind(i)
            marked = " here" if i == here else ""
            self.parts.append(
                f'<rect class="{name}{marked}" x="{x:g}" y="{self.y:g}" width="{width:g}" height="{height:g}"/>'
            )
            lines = text.split("\n")
            for line, words in enumerate(lines):
                self._word(words, x + width / 2, self.y + height / 2 + 4 + 14 * (line - (len(lines) - 1) / 2))
        self.y += height
        return width

    def zoom(self, begin: float, end: float, below: float = 14) -> None:
        """From a box of the row above to the whole row below."""
        top, self.y = self.y, self.y + below
        self.parts.append(f'<path d="M{begin:g} {top:g} L{LEFT} {self.y:g} M{end:g} {top:g} L{RIGHT} {self.y:g}"/>')

    def arrow(self, x: float = WIDTH / 2, length: float = 16) -> None:
        end = self.y + length
        self.parts.append(f'<path d="M{x:g} {self.y:g} V{end:g} m-4 -5 l4 5 l4 -5"/>')
        self.y = end

    def svg(self) -> str:
        height = self.y + 12
        size = f'width="{WIDTH}" height="{height:g}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" {size} role="img">',
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style>",
            f'<rect class="page" {size}/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def selection() -> Drawing:
    drawing = Drawing("How a kernel is chosen")
    steps = (
        ("a", "problem", "m, n, k, format, group_size, arch, SMs"),
        ("o", "candidates", "the list of configurations"),
        ("o", "legal ones", "a kernel's rules"),
        ("o", "time of each, us", "one equation, fitted constants"),
        ("b", "the cheapest", "a KernelConfig"),
    )
    for i, (kind, name, what) in enumerate(steps):
        if i:
            drawing.arrow()
        drawing.boxes([f"{name}\n{what}"], kind, left=70, right=WIDTH - 70, height=42)
    return drawing


def pipeline() -> Drawing:
    drawing = Drawing("The pipeline of gemm_sm90")
    drawing.text("producers: a warp each, TMA into the stages", kind="head")
    drawing.boxes(["weights", "x", "scales", "zero points"], "a")
    drawing.arrow()
    drawing.text("stages in shared memory, full and empty barriers", kind="head")
    drawing.boxes(["k-tile 0", "k-tile 1", "k-tile 2", "k-tile 3"], "o")
    drawing.arrow()
    drawing.text("consumers: 2 to 4 warpgroups, in time", kind="head")
    steps = [*(f"load,\nconvert {i}" for i in range(4)), "..."]
    width = drawing.boxes(steps, "c", height=40)
    drawing.boxes([f"wgmma {i}" for i in range(4)], "b", left=LEFT + width)
    return drawing


def word() -> Drawing:
    drawing = Drawing("The order of elements in a 32-bit word")

    def half(count: int) -> Callable[[int], str]:
        return lambda i: "a" if i < count else "b"

    drawing.text("int4: bits 31 .. 0, a nibble each", kind="head")
    drawing.boxes(["e7", "e5", "e3", "e1", "e6", "e4", "e2", "e0"], half(4))
    drawing.text("bits 31 .. 16", LEFT + 104, "note", "middle", below=-12)
    drawing.text("bits 15 .. 0", LEFT + 312, "note", "middle")
    for mask, pairs in (
        ("word & 0x000f000f", "e1 | e0"),
        ("word & 0x00f000f0", "e3 | e2"),
        ("word >> 8, the same two", "e5 | e4,  e7 | e6"),
    ):
        drawing.text(f"{mask}:  {pairs}", kind="note", below=3)
    drawing.y += 8
    drawing.text("int8: a byte each", kind="head")
    drawing.boxes(["e3", "e1", "e2", "e0"], half(2))
    return drawing


def interleaved() -> Drawing:
    drawing = Drawing("The passes of the layout interleaved")
    kinds = "abcd"
    drawing.text("permute_rows, int8: blocks of 16 rows", kind="head")
    drawing.boxes([str(k) for k in range(16)], lambda i: kinds[i % 8 // 2])
    drawing.arrow()
    out = [k for thread in range(4) for k in (2 * thread, 2 * thread + 1, 2 * thread + 8, 2 * thread + 9)]
    drawing.boxes([str(k) for k in out], lambda i: kinds[i // 4])
    drawing.boxes([f"thread {j}" for j in range(4)], lambda i: kinds[i], height=22)
    drawing.text("what a thread of a quad needs comes into its word", kind="note", below=14)
    drawing.text("interleave_columns, int4: lines of 128 bytes", kind="head")
    for first, rows, kind in ((0, "0..63", ""), (0, "64..127", ""), (4, "0..63", "o")):
        texts = [f"n {first + i}\nk' {rows}" for i in range(4)]
        drawing.boxes(texts, kind or kinds.__getitem__, height=38)
    drawing.text("each box: 64 rows of one column, 32 bytes; n 4 follows the last rows", kind="note", below=0)
    return drawing


def tiled() -> Drawing:
    drawing = Drawing("The layout tiled: panels, blocks, fragments, lanes")
    drawing.text("w: panels of 64 columns, one after another", kind="head")
    width = drawing.boxes([f"panel {i}" for i in range(4)], "o", here=0)
    drawing.zoom(LEFT, LEFT + width)
    drawing.text("panel: blocks of 64 rows", kind="head")
    width = drawing.boxes([f"block {i}" for i in range(4)] + ["..."], "a", here=1)
    drawing.zoom(LEFT + width, LEFT + 2 * width)
    drawing.text("block, 2 KB of int4: the fragments of four warps", kind="head")
    width = drawing.boxes([f"warp {i}" for i in range(4)], "b", here=1)
    drawing.zoom(LEFT + width, LEFT + 2 * width)
    drawing.text("fragment, 512 bytes: 32 lanes, lane = 4g + t", kind="head")
    width = drawing.boxes([*(f"lane {i}" for i in range(5)), "... 31"], "c", here=2)
    drawing.zoom(LEFT + 2 * width, LEFT + 3 * width)
    drawing.text("lane, 16 bytes: four words of eight nibbles", kind="head")
    drawing.boxes([f"word {i}\nk {16 * i}-{16 * i + 15}" for i in range(4)], "d", height=40)
    drawing.text("A word is the A registers 0 to 3 of 16 k: two masks and a shift.", kind="note", below=0)
    return drawing


def groups() -> Drawing:
    drawing = Drawing("Groups of rows share a scale and a zero point")
    for kind, group, i in (("a", "group 0", "0"), ("b", "group 1", "1"), ("c", "...", "")):
        top = drawing.y
        drawing.boxes([f"q: g rows of column n\n{group}"], kind, right=210, height=56)
        drawing.y = top + 8
        drawing.boxes([f"{name}[{i}, n]" if i else "..." for name in ("scales", "zeros")], kind, left=236, height=40)
        drawing.y = top + 56
    drawing.text("q: K rows, N columns", LEFT + 99, "note", "middle", below=-12)
    drawing.text("K / g rows, N columns", 332, "note", "middle", below=0)
    return drawing


DRAWINGS: dict[Path, Callable[[], Drawing]] = {
    ASSETS / "selection.svg": selection,
    ASSETS / "pipeline_sm90.svg": pipeline,
    ASSETS / "layout_word.svg": word,
    ASSETS / "layout_interleaved.svg": interleaved,
    ASSETS / "layout_tiled.svg": tiled,
    ASSETS / "groups.svg": groups,
}


def main() -> int:
    for path, draw in DRAWINGS.items():
        path.write_text(draw().svg(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
