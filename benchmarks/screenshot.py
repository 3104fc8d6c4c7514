"""Takes a picture of a report or comparison page for README.md.

    python benchmarks/screenshot.py runs/eagle-tiny-stdlib/report.html --out benchmarks/results/report_page.png

Uses Debian's headless Chromium, 1,100 pixels wide (--width). --height limits the height; --dark takes the dark color scheme.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import parser
from tests.browser import CHROMIUM, MISSING, Tab, browse


def main() -> None:
    cli = parser(__doc__, "report_page.png")
    cli.add_argument("page", type=Path)
    cli.add_argument("--width", type=int, default=1100)
    cli.add_argument("--height", type=int, default=None, help="of the picture; the whole page if not given")
    cli.add_argument("--dark", action="store_true")
    args = cli.parse_args()
    if CHROMIUM is None:
        cli.error(MISSING)
    if not args.page.is_file():
        cli.error(f"there is no file {args.page}")

    async def look(tab: Tab) -> None:
        await tab.open(args.page, (args.width, args.height or 900), dark=args.dark)
        clip = None if args.height is None else {"x": 0, "y": 0, "width": args.width, "height": args.height}
        await tab.screenshot(args.out, clip=clip)

    browse(look)
    with Image.open(args.out) as picture:  # 128 colors suffice for text and lines, at a third of the bytes
        small = picture.convert("RGB").quantize(128)
    small.save(args.out, optimize=True)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
