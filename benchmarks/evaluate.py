"""Runs `python -m inference evaluate` over all of Spec-Bench, kills and resumes it once, and checks it with Spec-Bench's own script.

    python benchmarks/evaluate.py --suite spec_bench.jsonl --spec-bench DIR    # DIR: a checkout of github.com/hemingkx/Spec-Bench

Target `tiny` with `assets/tiny_eagle`, which drafts a tree in every round (decode=auto would not, for so short answers). Turns are plain
text, and prompts that are too long lose their beginning. About a quarter of an hour on one core.
Every step continues where it stopped (--out keeps the state). Writes benchmarks/results/evaluate.json: the rows of
evaluate.json over all prompts and by category, what the kill has cost, and what Spec-Bench's evaluation/speed.py computes from the files.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import RESULTS, ROOT, keep, parser
from headstart.heads.files import put_text

KEPT = ("name", "temperature", "sequences", "category", "prompts", "answers", "accepted_length", "tokens_per_second", "speedup",
        "intervals", "repetition")  # fmt: skip
# Its command line is hard-coded to three runs of the authors, so the function behind it is called. An earlier command line called it too.
CALL = "import runpy, sys; runpy.run_path(sys.argv[1])['get_single_speedup'](*sys.argv[2:])"
TASKS = re.compile(r"Task:  (\w+) .*?#Mean accepted tokens:  (\S+)\n.*?Speedup ratio:  (\S+)", re.DOTALL)


def command(suite: Path, out: Path, new_tokens: int) -> list[str]:
    return ["-m", "headstart.inference", "evaluate", "speculator=assets/tiny_eagle", "suite=spec_bench", f"path={suite}", "raw=true",
            "decode=dynamic", "on_long=cut", f"new_tokens={new_tokens}", f"out={out}"]  # fmt: skip


def killed(arguments: list[str], out: Path, lines: int) -> dict[str, Any]:
    """Kill the evaluation once the file has enough lines. Returns its content, of which the next start must lose nothing."""
    process, path = subprocess.Popen([sys.executable, *arguments], cwd=ROOT), out / "results.jsonl"
    while process.poll() is None and (not path.is_file() or path.read_bytes().count(b"\n") <= lines):
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    data = path.read_bytes()
    with path.open("ab") as file:  # as if the kill had come within a line
        file.write(b'{"sequences":1,"temperature":0.0,"questions":[')
    return {"lines": data.count(b"\n") - 1, "bytes": len(data)}


def by_their_script(script: Path, out: Path, side: str, temperature: str) -> dict[str, Any]:
    """Task -> what Spec-Bench's evaluation/speed.py prints."""
    files = [str(out / "spec_bench" / f"{name}-T{temperature}.jsonl") for name in (side, "plain")]
    arguments = [sys.executable, "-c", CALL, str(script), *files, str(ROOT / "assets" / "tiny")]
    said = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    return {task: {"accepted_length": float(length), "speedup": float(speed)} for task, length, speed in TASKS.findall(said)}


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--suite", type=Path, required=True, help="Spec-Bench's question.jsonl")
    cli.add_argument("--spec-bench", type=Path, required=True, help="a checkout of Spec-Bench: its evaluation/speed.py is run")
    cli.add_argument("--new-tokens", type=int, default=24)
    cli.add_argument("--kill-after", type=int, default=200, help="lines")
    cli.add_argument("--out", type=Path, default=ROOT / "runs" / "evaluate")
    args = cli.parse_args()
    out, arguments = args.out.resolve(), command(args.suite.resolve(), args.out.resolve(), args.new_tokens)
    noted = out / "killed.json"
    if not noted.is_file():
        found = killed(arguments, out, args.kill_after)
        put_text(noted, json.dumps(found))
        print(f"killed after {found['lines']} lines", flush=True)
    found = json.loads(noted.read_text())
    before = (out / "results.jsonl").read_bytes()[: found["bytes"]]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)
    now = (out / "results.jsonl").read_bytes()
    made = json.loads((out / "evaluate.json").read_text())
    script = args.spec_bench / "evaluation" / "speed.py"
    sides = sorted({row["name"] for row in made["rows"]} - {"plain"})
    lost = set(before.splitlines()) - set(now.splitlines())
    result = {
        "command": " ".join(["python", *command(Path("spec_bench.jsonl"), Path("DIR"), args.new_tokens)]),
        "killed_after_lines": found["lines"], "lines": now.count(b"\n") - 1, "lines_lost": len(lost),
        **{key: made[key] for key in made if key not in ("version", "suite", "target", "speculator", "rows", "cut", "left_out")},
        "rows": [{key: row[key] for key in KEPT if key in row} for row in made["rows"]],
        "by_spec_bench": {f"{side}-T{t}": by_their_script(script, out, side, t) for side in sides for t in "01"},
    }  # fmt: skip
    keep(RESULTS / "evaluate.json", result)
    print(json.dumps(result["by_spec_bench"], indent=2))


if __name__ == "__main__":
    main()
